//! The examples over the stand-in, as an AMD user runs them.

use std::path::Path;
use std::process::Output;

use serde_json::Value;

use crate::child::Child;

fn run(child: &Child, name: &str, arguments: &[&str]) -> Output {
    // target/PROFILE/deps/hip-HASH -> target/PROFILE/examples/NAME
    let test = std::env::current_exe().unwrap();
    let path = test.parent().and_then(Path::parent).unwrap().join("examples").join(name);
    assert!(path.exists(), "{} is not built: run `cargo build --examples` first", path.display());
    child.command(path.to_str().unwrap()).args(arguments).output().unwrap()
}

fn json(output: &Output) -> Value {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn kv_cache_runs_in_every_personality() {
    let small = ["--device=hip:0", "--slots=4", "--bytes-per-token=4096", "--requests=20", "--json"];
    for (personality, mode) in [
        ("5.7", "contiguous"),
        ("6.1", "contiguous"),
        ("6.4.3", "contiguous"),
        ("7.2.4", "contiguous"),
        ("7.10", "contiguous"),
        ("7.14.1", "virtual"),
        ("10.0", "virtual"),
        ("gfx1201", "contiguous"),
    ] {
        let report = json(&run(&Child::of(personality), "kv_cache", &small));
        assert_eq!(report["mode"], mode, "{personality}: {report}");
        assert_eq!(report["mismatches"], 0, "{personality}: {report}");
        assert_eq!(report["address_moves"], 0, "{personality}: {report}");
    }
}

#[test]
fn doctor_says_what_there_is() {
    let child = Child::of("7.14.1").set("FAKE_AMDHIP_DEVICES", "2").under(&["-Sn 1024", "-Hn 4096"]);
    let output = run(&child, "doctor", &[]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("hip:0") && text.contains("hip:1"), "{text}");
    assert!(text.contains("HIP runtime 7.14.60850"), "{text}");
    let output = run(&Child::of("7.2.4"), "doctor", &[]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("4 KiB, not 2 MiB or more (HIP runtime 7.2.53211)"), "{text}");
    let report = json(&run(&Child::of("none"), "doctor", &["--json"]));
    assert!(report.to_string().contains("shows this process no device"), "{report}");
}
