//! Prints the cases that inputs make, and runs them: `cargo run --bin show -- artifacts/crash-...`.

fn main() -> std::io::Result<()> {
    for path in std::env::args_os().skip(1) {
        let bytes = std::fs::read(&path)?;
        println!("{}", path.display());
        growspan_fuzz::show(&bytes);
        growspan_fuzz::run_bytes(&bytes);
    }
    Ok(())
}
