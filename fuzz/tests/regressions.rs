//! Inputs that once broke a promise, those that chance would be long in finding, and random ones from a fixed seed, as an ordinary test.

use std::path::Path;

#[test]
fn what_once_failed_does_not_fail_again() {
    let folders = ["regressions", "seeds"].map(|name| Path::new(env!("CARGO_MANIFEST_DIR")).join(name));
    let entries = folders.iter().flat_map(|folder| folder.read_dir().unwrap());
    let mut inputs: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    inputs.sort();
    for input in inputs {
        eprintln!("{}", input.display());
        growspan_fuzz::run_bytes(&std::fs::read(&input).unwrap());
    }
}

#[test]
fn random_cases_keep_every_promise() {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    for number in 0..500 {
        let length = 32 + usize::try_from(random() % 600).unwrap();
        let bytes: Vec<u8> = (0..length).map(|_| random().to_le_bytes()[3]).collect();
        eprintln!("random case {number}");
        growspan_fuzz::run_bytes(&bytes);
    }
}
