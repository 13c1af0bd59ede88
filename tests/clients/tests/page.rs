//! Compares the code of the guide with the recipes, and its dependencies with those of this package.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

const PAGES: [&str; 3] = ["blocking", "clients", "grpc"];

/// Returns what stands between two lines, wherever they are.
fn between<'a>(text: &'a str, first: &str, last: &str) -> Vec<&'a str> {
    let parts = text.split(first).skip(1);
    parts
        .map(|part| part.split(last).next().unwrap().trim_end())
        .collect()
}

fn read(path: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap()
}

fn pages() -> [String; 3] {
    PAGES.map(|page| read(&format!("../../src/guide/{page}.md")))
}

#[test]
fn the_guide_has_the_recipes_word_for_word() {
    let pages = pages();
    // Shorter blocks show how a recipe is used.
    let on_pages: BTreeSet<&str> = pages
        .iter()
        .flat_map(|page| between(page, "```text\n", "\n```"))
        .filter(|block| block.starts_with("use "))
        .collect();
    let files: Vec<String> = fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("src"))
        .unwrap()
        .map(|file| fs::read_to_string(file.unwrap().path()).unwrap())
        .collect();
    let recipes: BTreeSet<&str> = files
        .iter()
        .flat_map(|file| between(file, "// [recipe]\n", "// [end]"))
        .collect();
    assert_eq!(
        recipes.len(),
        files.len() - 1,
        "each file has one, but lib.rs"
    );
    let different: Vec<_> = on_pages.symmetric_difference(&recipes).collect();
    assert!(different.is_empty(), "{different:#?}");
}

/// Returns the dependencies in the lines of a manifest, with their versions.
fn versions(lines: &str) -> BTreeMap<&str, &str> {
    lines
        .lines()
        .filter_map(|line| {
            let (name, value) = line.split_once(" = ")?;
            let value = value.strip_prefix("{ version = ").unwrap_or(value);
            Some((name, value.strip_prefix('"')?.split_once('"')?.0))
        })
        .collect()
}

#[test]
fn the_guide_names_the_versions_that_are_tested() {
    let manifest = read("Cargo.toml");
    let tested = versions(between(&manifest, "[dependencies]\n", "\n[")[0]);
    assert!(tested.len() >= 15, "{tested:?}");
    for page in &pages() {
        for lines in between(page, "```toml\n", "\n```") {
            let named = versions(lines);
            assert_eq!(named.len(), lines.lines().count(), "{lines}");
            for (name, version) in named {
                if name != "tollgate" {
                    assert_eq!(tested.get(name), Some(&version), "{name}");
                }
            }
        }
    }
}
