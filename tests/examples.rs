//! The examples, run as their users run them.
//!
//! `cargo test` builds them beforehand; so does `cargo build --examples`.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

/// Engine parameters that take moments without optimisation.
const SMALL: [&str; 4] = ["--device=host", "--slots=4", "--bytes-per-token=100", "--requests=12"];

fn example(name: &str) -> PathBuf {
    // target/PROFILE/deps/examples-HASH -> target/PROFILE/examples/NAME
    let test = std::env::current_exe().unwrap();
    let path = test.parent().and_then(Path::parent).unwrap().join("examples").join(name);
    assert!(path.exists(), "{} is not built: run `cargo build --examples` first", path.display());
    path
}

fn run(name: &str, args: &[&str]) -> Output {
    Command::new(example(name)).args(args).output().unwrap()
}

fn kv_cache(args: &[&str]) -> Output {
    run("kv_cache", &[&SMALL, args].concat())
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Standard output, which is one JSON object and nothing else.
fn json(output: &Output) -> Value {
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let value: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(value.is_object());
    value
}

fn number(value: &Value, field: &str) -> u64 {
    value[field].as_u64().unwrap_or_else(|| panic!("{field} is {}", value[field]))
}

/// The run ends with status 2, nothing on standard output and all of `parts` in the message.
fn refused(output: &Output, parts: &[&str]) {
    let message = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{message}");
    assert_eq!(text(&output.stdout), "");
    for part in parts {
        assert!(message.contains(part), "{part:?} is not in {message:?}");
    }
    assert!(!message.contains("panicked"), "{message}");
}

/// A file with this content, gone at the end.
struct Trace(PathBuf);

impl Trace {
    fn new(name: &str, content: impl AsRef<[u8]>) -> Self {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{}-{name}.csv", std::process::id()));
        fs::write(&path, content).unwrap();
        Self(path)
    }

    fn path(&self) -> &str {
        self.0.to_str().unwrap()
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

#[test]
fn the_engine_keeps_every_byte_and_never_moves() {
    let all = json(&kv_cache(&["--json"]));
    assert_eq!(all["device"], "host");
    assert_eq!(all["mode"], "virtual");
    assert_eq!(all["reason"], Value::Null);
    assert_eq!(all["policy"], "ladder");
    assert_eq!((number(&all, "requests"), number(&all, "refused"), number(&all, "truncated")), (12, 0, 0));
    assert_eq!((number(&all, "mismatches"), number(&all, "address_moves")), (0, 0));
    assert_eq!(number(&all, "verified_bytes"), 100 * number(&all, "tokens"));
    assert_eq!(number(&all, "tokens"), number(&all, "prompt_tokens") + number(&all, "generated_tokens"));
    assert_eq!(number(&all, "contiguous_bytes"), 4 * 16_384 * 100);
    assert_eq!(number(&all, "grows"), 12 + number(&all, "generated_tokens"));
    // A chunk of 2 MiB holds any of these requests.
    assert_eq!(number(&all, "peak_committed_bytes"), 4 * (2 << 20));
    assert!(number(&all, "peak_stored_bytes") <= number(&all, "peak_committed_bytes"));
    assert!(number(&all, "peak_held_bytes") >= number(&all, "peak_committed_bytes"));
    assert!(number(&all, "driver_calls") > 0 && number(&all, "open_files_peak") > 3);
    assert!(all["grow_p50_us"].as_f64().unwrap() <= all["grow_p99_us"].as_f64().unwrap());
    assert!(all["seconds"].as_f64().unwrap() > 0.0);
}

#[test]
fn every_policy_works() {
    for (policy, printed) in [("exact", "exact"), ("uniform:4MiB", "uniform:4MiB"), ("ladder", "ladder")] {
        let all = json(&kv_cache(&["--json", "--policy", policy]));
        assert_eq!(all["policy"], printed);
        assert_eq!(all["sizing_in_force"], printed);
        assert_eq!(number(&all, "mismatches"), 0);
    }
}

#[test]
fn the_built_in_traffic_is_as_long_as_the_published_one() {
    let all = json(&run("kv_cache", &["--device=host", "--bytes-per-token=1", "--requests=1000", "--json"]));
    let mean = |field| number(&all, field) as f64 / 1000.0;
    assert!((1050.0..1270.0).contains(&mean("prompt_tokens")), "{all}");
    assert!((190.0..232.0).contains(&mean("generated_tokens")), "{all}");
}

#[test]
fn people_get_a_table() {
    let output = kv_cache(&[]);
    assert_eq!(output.status.code(), Some(0));
    let table = text(&output.stdout);
    for part in ["12 requests", "every byte as it was stored", "never moved", "6.25 MiB  100.0 %", "committed", "grow"]
    {
        assert!(table.contains(part), "{part:?} is not in\n{table}");
    }
}

#[test]
fn contiguous_memory_is_all_taken_at_the_start_and_says_why() {
    let all = json(&kv_cache(&["--json", "--contiguous", "--max-context", "20480"]));
    assert_eq!(all["mode"], "contiguous");
    assert_eq!(all["reason"], "contiguous memory was asked for");
    assert_eq!(all["sizing_in_force"], Value::Null);
    assert_eq!((number(&all, "mismatches"), number(&all, "address_moves"), number(&all, "mapping_grows")), (0, 0, 0));
    assert_eq!(number(&all, "peak_committed_bytes"), number(&all, "contiguous_bytes"));
}

/// A card that says it has virtual memory and has not: the same job in one block a slot.
#[cfg(feature = "sim")]
#[test]
fn the_job_runs_on_under_a_vgpu_profile() {
    let virtually = json(&kv_cache(&["--json", "--device", "sim"]));
    assert_eq!(virtually["mode"], "virtual");
    let all = json(&kv_cache(&["--json", "--device", "sim:vgpu"]));
    assert_eq!(all["mode"], "contiguous");
    assert!(all["reason"].as_str().unwrap().contains("not supported"), "{all}");
    for field in ["requests", "tokens", "verified_bytes", "mismatches", "address_moves"] {
        assert_eq!(all[field], virtually[field], "{field}");
    }
    assert_eq!((number(&all, "mismatches"), number(&all, "address_moves")), (0, 0));
}

#[test]
fn more_contiguous_memory_than_there_is_is_an_error_with_figures() {
    let output = kv_cache(&["--contiguous", "--max-context=1000000000", "--bytes-per-token=1MiB"]);
    refused(&output, &["slot 1 of 4", "out of memory: 953.67 TiB asked"]);
    let output = kv_cache(&["--max-context=4294967295", "--bytes-per-token=64MiB", "--slots=4294967295"]);
    refused(&output, &["do not fit in 64 bits"]);
}

#[test]
fn a_trace_decides_the_requests() {
    let content = "\u{feff}TIMESTAMP,GeneratedTokens,ContextTokens\r\n2023-11-16 18:15:46.6,3,10\r\nlater, 5 , 20 \r\n";
    let trace = Trace::new("good", content);
    let all = json(&kv_cache(&["--json", "--trace", trace.path()]));
    assert_eq!(all["trace"], trace.path());
    assert_eq!((number(&all, "requests"), number(&all, "prompt_tokens"), number(&all, "generated_tokens")), (2, 30, 8));
    assert_eq!(number(&json(&kv_cache(&["--json", "--trace", trace.path(), "--requests=1"])), "tokens"), 13);
}

#[test]
fn what_does_not_fit_is_refused_or_cut_short_and_counted() {
    let trace =
        Trace::new("long", "ContextTokens,GeneratedTokens\n10,20\n20,80\n20,81\n99,50\n100,1\n4294967295,4294967295\n");
    let all = json(&kv_cache(&["--json", "--max-context=100", "--trace", trace.path()]));
    assert_eq!((number(&all, "requests"), number(&all, "refused"), number(&all, "truncated")), (4, 2, 2));
    assert_eq!(number(&all, "tokens"), 30 + 100 + 100 + 100);
    let none = Trace::new("none", "ContextTokens,GeneratedTokens\n500,20\n");
    refused(&kv_cache(&["--max-context=100", "--trace", none.path()]), &["no request was served", "1 did not fit"]);
    assert_eq!(number(&all, "mismatches"), 0);
}

#[test]
fn a_bad_trace_is_named_with_its_line() {
    let header = "TIMESTAMP,ContextTokens,GeneratedTokens\n";
    for (name, line, parts) in [
        ("zero", "t,0,4", ["ContextTokens is \"0\"", "from 1 to 4294967295"]),
        ("negative", "t,7,-4", ["GeneratedTokens is \"-4\"", "from 1 to"]),
        ("huge", "t,4294967296,4", ["ContextTokens is \"4294967296\"", "from 1 to"]),
        ("word", "t,7,four", ["GeneratedTokens is \"four\"", "from 1 to"]),
        ("nothing", "t,,4", ["ContextTokens is \"\"", "from 1 to"]),
        ("short", "t,7", ["\"t,7\" has 2 fields", "the header has 3"]),
        ("long-line", "t,7,4,1", ["has 4 fields", "the header has 3"]),
        ("blank", "", ["has 1 fields", "the header has 3"]),
    ] {
        let trace = Trace::new(name, format!("{header}t,374,44\n{line}\nt,1,1\n"));
        let place = format!("{}:3: ", trace.path());
        refused(&kv_cache(&["--trace", trace.path()]), &[&place, parts[0], parts[1]]);
    }
    let trace = Trace::new("bytes", [header.as_bytes(), b"\xff\xfe,1,1\n"].concat());
    refused(&kv_cache(&["--trace", trace.path()]), &[&format!("{}:2: ", trace.path()), "UTF-8"]);
}

#[test]
fn a_trace_needs_a_header_and_requests() {
    let empty = Trace::new("empty", "");
    refused(&kv_cache(&["--trace", empty.path()]), &[empty.path(), "the file is empty"]);
    let bare = Trace::new("bare", "ContextTokens,GeneratedTokens\n");
    refused(&kv_cache(&["--trace", bare.path()]), &[bare.path(), "no request"]);
    let headless = Trace::new("headless", "2023-11-16,374,44\n");
    refused(&kv_cache(&["--trace", headless.path()]), &[&format!("{}:1: ", headless.path()), "ContextTokens"]);
    refused(&kv_cache(&["--trace", "/no/such/file.csv"]), &["/no/such/file.csv: ", "No such file"]);
}

#[test]
fn bad_usage_of_kv_cache_is_refused() {
    for (args, part) in [
        (&["--device", "tpu:0"][..], "no device named \"tpu:0\""),
        (&["--device=cuda:-1"], "no device named"),
        (&["--device=cuda:4000000"], "cuda:4000000"),
        (&["--policy", "best"], "--policy is \"best\""),
        (&["--policy=uniform:two"], "--policy is"),
        (&["--policy=uniform:0"], "chunks of 0 B"),
        (&["--policy=uniform:3MiB"], "chunks of 3 MiB"),
        (&["--bytes-per-token", "0"], "--bytes-per-token is \"0\""),
        (&["--bytes-per-token=65MiB"], "from 1 to 64 MiB"),
        (&["--slots", "0"], "--slots is \"0\""),
        (&["--max-context=0"], "--max-context is"),
        (&["--requests=-1"], "--requests is"),
        (&["--requests=99999999999999999999"], "--requests is"),
        (&["--slots"], "--slots needs a value"),
        (&["--json=yes"], "--json takes no value"),
        (&["--fast"], "\"--fast\" is not an option"),
        (&["trace.csv"], "\"trace.csv\" is not an option"),
    ] {
        refused(&kv_cache(args), &["kv_cache: ", part]);
    }
}

#[test]
fn help_is_on_standard_output() {
    for name in ["kv_cache", "doctor"] {
        let output = run(name, &["--help"]);
        assert_eq!(output.status.code(), Some(0));
        assert!(text(&output.stdout).contains(&format!("Usage: {name}")));
    }
}

#[test]
fn the_doctor_looks_at_every_backend() {
    let all = json(&run("doctor", &["--json"]));
    let devices = all["devices"].as_array().unwrap();
    for device in devices {
        assert!(device["id"].is_string());
        if device["error"].is_string() {
            continue;
        }
        assert_eq!(device["mode"] == "contiguous", device["reason"].is_string(), "{device}");
        assert_eq!(device["reason"].is_string(), device["advice"].is_string());
        assert_eq!(device["check"]["steps"].as_array().unwrap().len(), growspan::verdict::Step::ALL.len());
    }
    for backend in ["host", "cuda", "hip"] {
        assert!(devices.iter().any(|device| device["id"].as_str().unwrap().starts_with(backend)), "{all}");
    }
    let host = devices.iter().find(|device| device["id"] == "host").unwrap();
    assert_eq!(host["mode"], "virtual");
    assert!(number(&host["open_files_needed"], "ladder") <= number(&host["open_files_needed"], "chunks_of_2_mib"));
    assert!(number(&all["process"]["open_files"], "held") > 0);
    assert!(number(&all["process"]["map_entries"], "limit") > 0);
}

#[test]
fn the_doctor_speaks_to_people_too() {
    let output = run("doctor", &[]);
    assert_eq!(output.status.code(), Some(0));
    let said = text(&output.stdout);
    for part in ["host: host memory", "=> virtual memory", "quirks:", "cuda:0", "hip:0", "this process", "open files:"]
    {
        assert!(said.contains(part), "{part:?} is not in\n{said}");
    }
    refused(&run("doctor", &["--fix"]), &["doctor: ", "\"--fix\" is not an option"]);
}

#[test]
fn pin_times_every_strategy_and_policy() {
    let output =
        run("pin", &["--device", "host", "--size=4MiB", "--size", "2MiB", "--repeats=2", "--thp=all", "--json"]);
    let value = json(&output);
    let results = value["results"].as_array().unwrap();
    // Own memory by four policies; the driver's, whole and in blocks, by the two that are not advice; two sizes.
    assert_eq!(results.len(), 2 * (4 + 2 + 2));
    for result in results {
        assert!(result["error"].is_null(), "{result}");
        let turns = result["turns"].as_array().unwrap();
        assert_eq!(turns.len(), 2);
        for turn in turns {
            let part = |name: &str| turn[name].as_f64().unwrap();
            assert!(part("total_ms") >= part("map_ms") + part("prefault_ms") + part("register_ms"), "{turn}");
            assert!(number(turn, "pieces") == 1 && turn["vmstat"]["pgfault"].as_u64().unwrap() > 0, "{turn}");
            assert_eq!(part("prefault_ms") > 0.0, result["strategy"] == "pieces", "{turn}");
        }
    }
    let file = Trace::new("fill", vec![7; 5000]);
    let output = run("pin", &["--device=host", "--size=2MiB", "--strategy=pieces", "--fill", file.path(), "--direct"]);
    let table = text(&output.stdout);
    assert!(
        table.contains("2 MiB  pieces") && table.contains("GiB/s") && table.lines().count() == 3 + 1 + 3,
        "{table}"
    );
    refused(&run("pin", &["--size", "none"]), &["--size \"none\""]);
    refused(&run("pin", &["--device", "cuda:77"]), &["cuda:77"]);
    // A combination that fails is told, and the others go on.
    let output = run("pin", &["--device=host", "--size=1024TiB", "--size=2MiB", "--strategy=pieces", "--json"]);
    assert_eq!(output.status.code(), Some(1));
    let value: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(value["results"][0]["error"].is_string() && value["results"][1]["error"].is_null(), "{value}");
}

#[test]
fn nothp_starts_a_program_without_huge_pages_and_becomes_it() {
    // The program, and one that it starts.
    let shell = "grep THP_enabled /proc/self/status; sh -c 'grep THP_enabled /proc/self/status'; exit 7";
    let output = run("nothp", &["sh", "-c", shell]);
    assert_eq!(output.status.code(), Some(7), "its exit status");
    let told = text(&output.stdout);
    assert!(told.is_empty() || told == "THP_enabled:\t0\nTHP_enabled:\t0\n", "{told}");
    let output = run("nothp", &["sh", "-c", "kill -TERM $$"]);
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&output.status), Some(15), "its signal");
    for (args, code) in [(&[][..], 2), (&["/nowhere/at/all"], 127), (&["/dev/null"], 126)] {
        assert_eq!(run("nothp", args).status.code(), Some(code), "{args:?}");
    }
}
