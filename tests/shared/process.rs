//! Processes of their own, with all that they print and a bound on how long they take.

use std::io::Read;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How a process ended, and all it printed.
pub(crate) struct Ended {
    /// None if it took too long and was ended.
    pub(crate) status: Option<ExitStatus>,
    pub(crate) text: String,
    pub(crate) took: Duration,
}

/// Runs a command to its end, or ends it.
pub(crate) fn run(command: &mut Command, patience: Duration) -> Ended {
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let started = Instant::now();
    let readers = [gather(child.stdout.take().unwrap()), gather(child.stderr.take().unwrap())];
    let status = wait(&mut child, started, patience);
    let text = readers.map(|reader| reader.join().unwrap()).concat();
    Ended { status, text, took: started.elapsed() }
}

fn gather(mut from: impl Read + Send + 'static) -> JoinHandle<String> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = from.read_to_end(&mut bytes);
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

fn wait(child: &mut Child, started: Instant, patience: Duration) -> Option<ExitStatus> {
    while started.elapsed() < patience {
        if let Some(status) = child.try_wait().unwrap() {
            return Some(status);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let _ = child.kill();
    let _ = child.wait();
    None
}
