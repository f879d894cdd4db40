//! The end of a process that did what a real runtime would punish with a crash, lost memory or garbage.

/// Says what was wrong and aborts. In this crate's own tests it panics, so that they can look on.
pub(crate) fn misuse(function: &str, what: impl core::fmt::Display) -> ! {
    end(format_args!("fake amdhip: misuse: {function}: {what}"))
}

/// Says what failed in the stand-in itself and aborts.
pub(crate) fn broken(what: impl core::fmt::Display) -> ! {
    end(format_args!("fake amdhip: {what}"))
}

#[cfg(test)]
#[allow(clippy::panic, reason = "tests look on")]
fn end(what: core::fmt::Arguments<'_>) -> ! {
    panic!("{what}")
}

#[cfg(not(test))]
fn end(what: core::fmt::Arguments<'_>) -> ! {
    eprintln!("{what}");
    std::process::abort()
}
