//! Compares the code of the page `guide::clients` with the recipes.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// Returns what stands between two lines, wherever they are.
fn between<'a>(text: &'a str, first: &str, last: &str) -> Vec<&'a str> {
    let parts = text.split(first).skip(1);
    parts
        .map(|part| part.split(last).next().unwrap().trim_end())
        .collect()
}

#[test]
fn the_page_has_the_recipes_word_for_word() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = fs::read_to_string(here.join("../../src/guide/clients.md")).unwrap();
    let on_page: BTreeSet<&str> = between(&page, "```text\n", "\n```").into_iter().collect();
    let files: Vec<String> = fs::read_dir(here.join("src"))
        .unwrap()
        .map(|file| fs::read_to_string(file.unwrap().path()).unwrap())
        .collect();
    let recipes: BTreeSet<&str> = files
        .iter()
        .flat_map(|file| between(file, "// [recipe]\n", "// [end]"))
        .collect();
    assert!(recipes.len() >= 7, "{recipes:?}");
    assert_eq!(on_page, recipes);
}
