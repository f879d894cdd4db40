//! Starts a program with transparent huge pages off, for it and all that it starts.
//!
//! ```text
//! nothp python3 serve.py --config engine.json
//! ```
//!
//! For programs that cannot be changed and whose page-locked memory takes minutes: AMD's runtime advises the kernel to make
//! huge pages of what it allocates, and the kernel moves memory about for that while the driver walks over it. Where the
//! program is your own, `ThpPolicy` and `ThpOff` do the same for as long as it is needed.
//!
//! The program takes this one's place, so that its exit status and its signals are its own. 2: no program was named; 1: the
//! kernel does not turn huge pages off; 126: the program cannot be started; 127: there is no such program.

use std::io::{self, ErrorKind, Write};
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

use growspan::sys::thp::ThpOff;

fn main() -> ExitCode {
    let mut words = std::env::args_os().skip(1);
    let Some(program) = words.next() else {
        return say(2, "usage: nothp PROGRAM [ARGUMENTS...]");
    };
    match ThpOff::enter() {
        // Not put back: what is set now is what the program starts with.
        Ok(off) => std::mem::forget(off),
        Err(error) => return say(1, &format!("nothp: huge pages cannot be turned off (PR_SET_THP_DISABLE): {error}")),
    }
    let error = Command::new(&program).args(words).exec();
    let code = if error.kind() == ErrorKind::NotFound { 127 } else { 126 };
    say(code, &format!("nothp: {}: {error}", program.display()))
}

fn say(code: u8, text: &str) -> ExitCode {
    let _ = writeln!(io::stderr(), "{text}");
    ExitCode::from(code)
}
