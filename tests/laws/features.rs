//! A feature only adds: it changes nothing in the other code of a program.

use std::env;
use std::process::Command;

/// With `tokio/test-util` a program pays for a clock that tests can pause. No feature of tollgate turns it on.
#[test]
fn features_leave_the_clock_of_tokio_alone() {
    let cargo = env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
    let tree = Command::new(cargo)
        .args([
            "tree",
            "--offline",
            "--package",
            "tollgate",
            "--all-features",
            "--prefix",
            "none",
        ])
        .args(["--edges", "normal,features"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("cargo runs");
    let errors = String::from_utf8_lossy(&tree.stderr);
    assert!(tree.status.success(), "{errors}");
    let tree = String::from_utf8(tree.stdout).expect("text");
    assert!(tree.contains("tokio feature \"time\""), "{tree}");
    assert!(!tree.contains("tokio feature \"test-util\""), "{tree}");
}
