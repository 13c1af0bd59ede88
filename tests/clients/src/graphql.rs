//! graphql_client: its queries over reqwest-middleware.

// [recipe]
use graphql_client::{GraphQLQuery, Response};
use reqwest_middleware::ClientWithMiddleware;

/// The query in `graphql/issues.graphql`.
#[derive(GraphQLQuery)]
#[graphql(
    schema_path = "graphql/schema.graphql",
    query_path = "graphql/issues.graphql",
    response_derives = "Debug"
)]
pub struct Issues;

/// Returns the issues of `repository`. `client` is that of the recipe for reqwest-middleware.
pub async fn issues(
    client: &ClientWithMiddleware,
    url: &str,
    repository: &str,
) -> reqwest_middleware::Result<Response<issues::ResponseData>> {
    let query = Issues::build_query(issues::Variables {
        repository: repository.to_owned(),
    });
    let response = client.post(url).json(&query).send().await?;
    Ok(response.error_for_status()?.json().await?)
}
// [end]
