//! Transparent huge pages: what the system and the process are set to.

use std::fs;

/// The settings that decide whether memory may become huge pages behind a program's back. `None` where the kernel does
/// not say.
///
/// ```
/// let thp = growspan::sys::thp::Thp::read();
/// if let Some(mode) = &thp.anonymous {
///     assert!(["always", "madvise", "never"].contains(&mode.as_str()));
/// }
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Thp {
    /// For anonymous memory: `always`, `madvise` or `never`.
    pub anonymous: Option<String>,
    /// For shared memory, the host driver's chunks among it: `always`, `within_size`, `advise`, `never`, `deny` or
    /// `force`.
    pub shared: Option<String>,
    /// Whether the process may have them at all (`THP_enabled`, cleared by `PR_SET_THP_DISABLE`).
    pub process: Option<bool>,
}

impl Thp {
    /// Reads them.
    #[must_use]
    pub fn read() -> Self {
        let setting = |name: &str| {
            let text = fs::read_to_string(format!("/sys/kernel/mm/transparent_hugepage/{name}")).ok()?;
            chosen(&text).map(str::to_owned)
        };
        Self {
            anonymous: setting("enabled"),
            shared: setting("shmem_enabled"),
            process: fs::read_to_string("/proc/self/status").ok().and_then(|text| enabled(&text)),
        }
    }
}

/// The word in brackets: `madvise` of `always [madvise] never`.
fn chosen(text: &str) -> Option<&str> {
    text.split_whitespace().find_map(|word| word.strip_prefix('[')?.strip_suffix(']'))
}

fn enabled(status: &str) -> Option<bool> {
    let value = status.lines().find_map(|line| line.strip_prefix("THP_enabled:"))?;
    match value.trim() {
        "0" => Some(false),
        "1" => Some(true),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_word_in_brackets() {
        assert_eq!(chosen("always [madvise] never\n"), Some("madvise"));
        assert_eq!(chosen("[always] within_size advise never deny force\n"), Some("always"));
        assert_eq!(chosen("always madvise never\n"), None);
        assert_eq!(chosen(""), None);
    }

    #[test]
    fn the_line_of_the_status_file() {
        assert_eq!(enabled("Name:\tx\nTHP_enabled:\t1\nThreads:\t3\n"), Some(true));
        assert_eq!(enabled("Name:\tx\nTHP_enabled:\t0\n"), Some(false));
        assert_eq!(enabled("Name:\tx\nUntag_mask:\t0\n"), None);
    }

    #[test]
    fn the_process_flag_is_the_real_one() {
        const NAME: &str = "sys::thp::tests::the_process_flag_is_the_real_one";
        crate::sys::tests::alone(NAME, || {
            let before = Thp::read().process;
            // SAFETY: this flag only sets a flag of the process, and all further arguments have to be zero.
            let rc = unsafe { libc::prctl(libc::PR_SET_THP_DISABLE, 1, 0, 0, 0) };
            // Kernels from before 5.0, or without huge pages, do not say.
            let expected = before.map(|enabled| enabled && rc != 0);
            assert_eq!(Thp::read().process, expected);
        });
    }
}
