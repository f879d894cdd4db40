//! Buffers, sets and the pool over a simulated driver that fails on purpose, against a model. See `growspan_fuzz`.
#![cfg_attr(fuzzing, no_main)]

#[cfg(fuzzing)]
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| growspan_fuzz::run_bytes(bytes));

#[cfg(not(fuzzing))]
fn main() {
    eprintln!("the fuzzer is built with coverage, by ci/fuzz.sh");
}
