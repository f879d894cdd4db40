//! What the kernel's memory management counts (`/proc/vmstat`), over the whole machine.

use core::fmt;
use std::fs;
use std::io;

macro_rules! counters {
    ($( $(#[$doc:meta])* $name:ident, )*) => {
        /// The counters at one moment. A kernel that does not have one counts zero.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct Vmstat {
            $( $(#[$doc])* pub $name: u64, )*
        }

        impl Vmstat {
            fn parse(text: &str) -> Self {
                let mut this = Self::default();
                for line in text.lines() {
                    let Some((name, value)) = line.split_once(' ') else { continue };
                    match name {
                        $( stringify!($name) => this.$name = value.trim().parse().unwrap_or(0), )*
                        _ => {}
                    }
                }
                this
            }

            /// What was counted since `earlier`.
            ///
            /// ```
            /// use growspan::sys::vmstat::Vmstat;
            ///
            /// let before = Vmstat::read()?;
            /// let _memory = vec![1_u8; 1 << 22];
            /// println!("{}", Vmstat::read()?.since(&before)); // e.g. `pgfault +1030`
            /// # Ok::<(), std::io::Error>(())
            /// ```
            #[must_use]
            pub const fn since(&self, earlier: &Self) -> Self {
                Self { $( $name: self.$name.saturating_sub(earlier.$name), )* }
            }

            /// Both together.
            #[must_use]
            pub const fn plus(&self, other: &Self) -> Self {
                Self { $( $name: self.$name.saturating_add(other.$name), )* }
            }

            /// Each counter with the kernel's name of it.
            pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> + use<> {
                [$( (stringify!($name), self.$name), )*].into_iter()
            }
        }
    };
}

counters! {
    /// Waits for memory to be compacted, by whoever asked for a large page.
    compact_stall,
    /// Compactions that made no large page.
    compact_fail,
    /// Compactions that did.
    compact_success,
    /// Pages taken back by whoever asked for memory.
    pgsteal_direct,
    /// Pages looked at for that.
    pgscan_direct,
    /// Waits for memory to be taken back, for memory that cannot move.
    allocstall_normal,
    /// Waits for memory to be taken back, for memory that can move.
    allocstall_movable,
    /// Pages read back from swap.
    pswpin,
    /// Pages written to swap.
    pswpout,
    /// Pages moved elsewhere in memory.
    pgmigrate_success,
    /// Huge pages given at a fault.
    thp_fault_alloc,
    /// Faults that a huge page was wanted for and not had.
    thp_fault_fallback,
    /// Runs of small pages made into a huge page later on.
    thp_collapse_alloc,
    /// Huge pages split.
    thp_split_page,
    /// Page faults that read from a disk.
    pgmajfault,
    /// Page faults.
    pgfault,
}

impl Vmstat {
    /// Reads them.
    ///
    /// # Errors
    /// Where `/proc` is not mounted.
    pub fn read() -> io::Result<Self> {
        fs::read_to_string("/proc/vmstat").map(|text| Self::parse(&text))
    }

    /// Waits for memory to be taken back.
    pub(crate) const fn stalls(&self) -> u64 {
        self.allocstall_normal.saturating_add(self.allocstall_movable)
    }
}

/// What is not zero: `compact_stall +1567, pgfault +31200000`.
impl fmt::Display for Vmstat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut first = true;
        for (name, value) in self.iter().filter(|(_, value)| *value > 0) {
            write!(f, "{}{name} +{value}", if first { "" } else { ", " })?;
            first = false;
        }
        if first { f.write_str("nothing") } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_found_by_their_whole_names() {
        let text = "nr_free_pages 4\npgfault 100\npgfault_x 7\npgmajfault 3\ncompact_stall 9\nbad\npswpin x\n";
        let read = Vmstat::parse(text);
        assert_eq!((read.pgfault, read.pgmajfault, read.compact_stall, read.pswpin, read.pswpout), (100, 3, 9, 0, 0));
        let later = Vmstat { pgfault: 130, pgmajfault: 1, compact_stall: 10, ..read };
        let since = later.since(&read);
        assert_eq!(since.to_string(), "compact_stall +1, pgfault +30");
        assert_eq!(since.plus(&since).pgfault, 60);
        assert_eq!(Vmstat::default().to_string(), "nothing");
        assert_eq!(since.iter().find(|(name, _)| *name == "pgfault"), Some(("pgfault", 30)));
    }

    #[test]
    fn the_kernel_counts_our_faults() {
        let before = Vmstat::read().unwrap();
        let bytes = 8 << 20;
        let addr = crate::sys::map::map_memory_anywhere(bytes).unwrap();
        // SAFETY: the memory is this test's own, and nobody has a reference into it.
        unsafe { crate::sys::pages::advise_huge(addr, bytes, false) }.unwrap();
        // SAFETY: as above.
        unsafe { crate::sys::pages::touch(addr, bytes) };
        let since = Vmstat::read().unwrap().since(&before);
        assert!(since.pgfault >= bytes / crate::sys::map::page_size(), "{since}");
        // SAFETY: as above.
        unsafe { crate::sys::map::unmap(addr, bytes) }.unwrap();
    }
}
