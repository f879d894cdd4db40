//! What each HIP runtime must be treated with, as a table.
//!
//! No version is free of serious faults in its virtual memory, and each has its own. A row says what a runtime does, on
//! which versions, builds, chips and kernels, where that is known from, and what this driver does about it. What no row
//! mentions holds on all versions and is simply how this crate calls drivers: a chunk is mapped as a whole at offset zero,
//! unmapped by itself with just the size it was mapped with, released after that, and spans are freed as they were reserved;
//! one thread at a time is in the runtime's virtual memory; and what the driver's own book does not know never gets there.

use core::fmt;
use core::time::Duration;

use super::version::HipVersion;
use crate::bytes::Bytes;
use crate::driver::Quirks;

/// A row of the [`TABLE`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Quirk {
    /// There is no virtual memory.
    NoVirtualMemory,
    /// Released memory never comes back.
    NeverReturns,
    /// Granting access never returns on older kernels.
    OldKernel,
    /// Virtual memory is broken on RDNA4.
    Gfx12,
    /// Virtual memory is broken on Windows.
    Windows,
    /// Access to chunks of mixed sizes is refused.
    OneChunkSize,
    /// Large chunks fail.
    SmallChunks,
    /// Calls are about the current device, whatever their arguments say.
    CurrentDevice,
    /// A map reports success and maps nothing.
    SilentMap,
    /// A map that failed keeps a reference to the handle.
    KeptReference,
    /// Unmapped memory does not return while its addresses stay reserved.
    KeptUnderSpan,
    /// Every handle keeps an open file.
    FilePerChunk,
    /// Every mapping takes an entry of the memory map.
    MapEntryPerChunk,
    /// Access for a peer after the owner's corrupts the mapping.
    PeersFirst,
    /// Fresh mappings read zeros for a while.
    LateMapping,
    /// Copies may not cross from one chunk to the next.
    CopyInOneChunk,
    /// The alignment asked for is ignored or refused.
    AlignByHand,
    /// A span may not have the addresses of one that was freed just before.
    LateRelease,
    /// An imported handle needs its file to be given access.
    FileForAccess,
    /// Free memory is over-reported.
    FreeIgnoresGraphics,
    /// Memory that the kernel moves is lost to the device.
    MovedMemory,
    /// Open files are lost as memory is unmapped.
    LostFiles,
    /// Any failure of creating is called out of memory.
    AnyFailureIsOutOfMemory,
}

/// What is known of one fault, and what is done about it.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Row {
    /// Its name.
    pub quirk: Quirk,
    /// What the runtime does.
    pub what: &'static str,
    /// What this driver does about it.
    pub treatment: &'static str,
    /// Where it is known from.
    pub source: &'static str,
    versions: Versions,
    builds: Option<&'static [u32]>,
    /// On the last of its versions it applies up to this build.
    last_build: Option<((u32, u32), u32)>,
    gfx: Option<&'static str>,
    drm_before: Option<(u32, u32)>,
    os: Option<&'static str>,
}

/// Versions of HIP, `(major, minor)`: from the first on and before the second, if there is one.
#[derive(Clone, Copy, Debug)]
struct Versions((u32, u32), Option<(u32, u32)>);

const EVER: Versions = Versions((0, 0), None);
/// All that have virtual memory.
const SINCE_6_1: Versions = Versions((6, 1), None);

/// A row that applies to these versions, whatever else.
const fn row(
    quirk: Quirk,
    versions: Versions,
    what: &'static str,
    treatment: &'static str,
    source: &'static str,
) -> Row {
    Row {
        quirk,
        what,
        treatment,
        source,
        versions,
        builds: None,
        last_build: None,
        gfx: None,
        drm_before: None,
        os: None,
    }
}

/// All that is known. "Run" in a source: the runtime's own code was run over a pretended kernel driver.
pub const TABLE: &[Row] = &[
    row(
        Quirk::NoVirtualMemory,
        Versions((0, 0), Some((6, 1))),
        "HIP has virtual memory on Linux since ROCm 6.1; before, reserving returns success and a null address",
        "off, whatever is forced",
        "clr 5.7.1 and 6.0.2, rocdevice.cpp",
    ),
    Row {
        builds: Some(&[43482, 43483]),
        ..row(
            Quirk::NeverReturns,
            Versions((6, 4), Some((6, 5))),
            "ROCm 6.4.0 never gives released memory back, and 6.4.1 is not known to",
            "off unless forced",
            "ROCm/hip#3781, confirmed fixed in 6.4.2",
        )
    },
    Row {
        drm_before: Some((3, 64)),
        os: Some("linux"),
        ..row(
            Quirk::OldKernel,
            Versions((7, 14), None),
            "ROCm 7.14 and newer hang when access is granted on kernels whose amdgpu driver is older than 3.64",
            "off unless forced",
            "ROCm/rocm-systems#9820, pytorch#192259",
        )
    },
    Row {
        // And not gfx125x, which is another family.
        gfx: Some("gfx120"),
        ..row(
            Quirk::Gfx12,
            EVER,
            "on RDNA4 (gfx1200 and gfx1201) mappings come late, lose writes and were seen to hang the card",
            "off unless forced",
            "ROCm/rocm-systems#11693, clr#288, lemonade llamacpp-rocm#87; ROCm 7.2.1 to 7.14",
        )
    },
    Row {
        os: Some("windows"),
        ..row(
            Quirk::Windows,
            EVER,
            "on Windows a second mapping shows the pages of the first, and addresses break after some reservations",
            "off unless forced",
            "ROCm/rocm-systems#6191 and #6051, hipfire#635 and #737",
        )
    },
    row(
        Quirk::OneChunkSize,
        Versions((7, 0), Some((7, 14))),
        "access is refused unless the sizes from the start of the span add up to the size asked for",
        "one chunk size per span, chosen from the span and the open files there are",
        "ROCm/rocm-systems#2451 and #2516, mori#640; run on 7.2.4",
    ),
    row(
        Quirk::SmallChunks,
        Versions((6, 1), Some((7, 0))),
        "single large handles fail on several cards of an MI300",
        "chunks of at most 256 MiB",
        "vllm#12695, torch_memory_saver#9, #14 and #52; ROCm 6.3 and 6.4",
    ),
    row(
        Quirk::CurrentDevice,
        SINCE_6_1,
        "memory comes from the current device since 7.0, whatever the properties name; so do granularity and figures",
        "the device is made current for every call, and the one before is made current again",
        "clr 2c9d3a32, hip_vm.cpp; run on 7.2.4",
    ),
    row(
        Quirk::SilentMap,
        Versions((6, 1), Some((7, 14))),
        "a map that fails returns success, and unmapping it crashes on 6.x",
        "what was not given access is asked after before it is unmapped, and what is not there is never unmapped",
        "clr rocvirtual.cpp, submitVirtualMap; run on 6.4.3 and 7.2.4; fixed by rocm-systems#6982",
    ),
    Row {
        // Run up to this one. To release once too often is worse than to leak: later builds may do it right.
        last_build: Some(((7, 2), 53211)),
        ..row(
            Quirk::KeptReference,
            Versions((6, 1), Some((7, 3))),
            "a map that failed keeps a reference, so that memory does not return when its handle is released",
            "such a handle is released twice",
            "run on 6.4.3 and 7.2.4",
        )
    },
    row(
        Quirk::KeptUnderSpan,
        Versions((7, 1), Some((7, 14))),
        "unmapped memory does not return while the span stays reserved: a mapping of the kernel driver's file keeps it",
        "empty pages are mapped over it",
        "ROCm/legacy-rocm-build#6021, vllm#37533 and #46203, torch_memory_saver#83 and #84; fixed by rocm-systems#4363",
    ),
    row(
        Quirk::FilePerChunk,
        Versions((7, 14), Some((7, 15))),
        "every handle keeps an open file, and creating is out of memory when there are none left",
        "the open files are budgeted and the soft limit is raised",
        "ROCm/legacy-rocm-build#6661, rocm-systems#10604; fixed in ROCm 10.0 by #7786",
    ),
    row(
        Quirk::MapEntryPerChunk,
        Versions((7, 0), None),
        "every mapping takes an entry of the process's memory map",
        "the entries are budgeted",
        "ROCr 7.x maps the kernel driver's file under each chunk; azhpc-images#445",
    ),
    row(
        Quirk::PeersFirst,
        SINCE_6_1,
        "granting a peer access after the owner has it corrupts the mapping",
        "peers get access first, the owner last",
        "openxla/xla#46576, on 7.14; rocm-systems#9908 mends it, and it does no harm on others",
    ),
    Row {
        gfx: Some("gfx120"),
        ..row(
            Quirk::LateMapping,
            EVER,
            "for a millisecond or two after mapping, reads give zeros and writes are lost",
            "2.5 ms are waited after each mapping",
            "ROCm/rocm-systems#11693; 7.2.1 and 7.14",
        )
    },
    row(
        Quirk::CopyInOneChunk,
        Versions((6, 1), Some((6, 2))),
        "a copy that crosses from one chunk to the next is refused",
        "copies and fills are cut at the borders",
        "clr 6.1, hip_memory.cpp",
    ),
    row(
        Quirk::AlignByHand,
        SINCE_6_1,
        "an alignment is ignored up to 6.4.3, and reserving with one was seen to fail on 7.2",
        "none is asked for; where the address does not fit, more is reserved and the base is rounded up",
        "clr rocdevice.cpp, vllm#43022",
    ),
    row(
        Quirk::LateRelease,
        Versions((6, 1), Some((7, 0))),
        "a span is forgotten some time after it was freed: one that got the same addresses is forgotten with it, and freeing \
         that one crashes",
        "freed addresses are kept from being handed out again for a quarter of a second",
        "run on 6.4.3, where it crashes by plain calls too; 7.2.4 does not",
    ),
    row(
        Quirk::FileForAccess,
        Versions((7, 14), None),
        "granting access to an imported handle fails once the file it came from is closed",
        "a duplicate of the file stays open as long as the handle",
        "ROCm/rocm-systems#8440",
    ),
    row(
        Quirk::FreeIgnoresGraphics,
        EVER,
        "free memory leaves out what graphics hold, and over-reports by gigabytes on a desktop",
        "the kernel's figure is taken where it is lower and of the same card",
        "llama.cpp#24906, ROCm/rocm-systems#7993",
    ),
    row(
        Quirk::MovedMemory,
        Versions((7, 14), Some((7, 16))),
        "memory that the kernel moves, where the card is short of it or a peer asks for it, may read as zeros afterwards",
        "it is said; nothing can be done from here but to leave some of the card's memory free",
        "ROCm/rocm-systems#9908, merged in August 2026: whether 10.0 has it is not known; legacy-rocm-build#6603",
    ),
    row(
        Quirk::LostFiles,
        Versions((7, 1), Some((7, 13))),
        "an open file may be lost each time something is unmapped",
        "it is said; a call that finds no file left says that, and large chunks take few calls",
        "ROCm/mori#455 and miles#1680, up to 7.2.4; fixed by rocm-systems#4363",
    ),
    row(
        Quirk::AnyFailureIsOutOfMemory,
        SINCE_6_1,
        "creating returns hipErrorOutOfMemory whatever went wrong",
        "open files and map entries are looked at before it is believed",
        "clr hip_vm.cpp, hipMemCreate",
    ),
];

/// What rows are chosen by.
#[derive(Clone, Debug)]
pub(super) struct Runtime {
    pub(super) version: HipVersion,
    /// The compiler's name for the chip, empty if it is not known.
    pub(super) gfx: String,
    /// The version of the kernel's amdgpu driver, where it is known.
    pub(super) drm: Option<(u32, u32)>,
    pub(super) os: &'static str,
}

impl Row {
    fn applies(&self, runtime: &Runtime) -> bool {
        let Versions(from, before) = self.versions;
        let pair = runtime.version.pair();
        pair >= from
            && before.is_none_or(|before| pair < before)
            && self.builds.is_none_or(|builds| builds.contains(&runtime.version.build))
            && self.last_build.is_none_or(|(last, build)| pair < last || runtime.version.build <= build)
            && self.gfx.is_none_or(|gfx| runtime.gfx.starts_with(gfx))
            && self.os.is_none_or(|os| runtime.os == os)
            // A kernel that is not known may be an old one, and what hangs in it takes the runtime's other calls with it.
            && self.drm_before.is_none_or(|before| runtime.drm.is_none_or(|drm| drm < before))
    }

    /// Whether it turns virtual memory off, and forcing turns it on again.
    const fn is_off_unless_forced(&self) -> bool {
        matches!(self.quirk, Quirk::NeverReturns | Quirk::OldKernel | Quirk::Gfx12 | Quirk::Windows)
    }
}

/// The rows in force for one device.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct InForce(u32);

impl InForce {
    /// The rows that apply to a runtime, but for those that are forced away and those left out on purpose.
    pub(super) fn find(runtime: &Runtime, force: bool, without: Self) -> Self {
        let mut found = Self::none();
        for row in TABLE.iter().filter(|row| row.applies(runtime) && !(force && row.is_off_unless_forced())) {
            found = found.with(row.quirk);
        }
        Self(found.0 & !without.0)
    }

    pub(super) const fn none() -> Self {
        Self(0)
    }

    pub(super) const fn with(self, quirk: Quirk) -> Self {
        Self(self.0 | 1 << quirk as u32)
    }

    pub(super) const fn has(self, quirk: Quirk) -> bool {
        self.0 & 1 << quirk as u32 != 0
    }

    /// Their rows.
    pub(super) fn rows(self) -> impl Iterator<Item = &'static Row> {
        TABLE.iter().filter(move |row| self.has(row.quirk))
    }

    /// What of them concerns the rest of the crate.
    pub(super) fn for_the_crate(self, runtime: &Runtime) -> Quirks {
        let usual = Quirks::default();
        let off = self.rows().find_map(|row| match row.quirk {
            Quirk::NoVirtualMemory => Some(row.what.to_owned()),
            Quirk::OldKernel => {
                let this = match runtime.drm {
                    Some((major, minor)) => format!("this one is {major}.{minor}"),
                    None => {
                        format!("this one does not say; {}=3.64 says that it is that or newer", super::KERNEL_VARIABLE)
                    }
                };
                Some(format!("{} ({this}){}", row.what, super::HOW_TO_FORCE))
            }
            Quirk::Gfx12 => Some(format!("{} (this one is {}){}", row.what, runtime.gfx, super::HOW_TO_FORCE)),
            _ if row.is_off_unless_forced() => Some(format!("{}{}", row.what, super::HOW_TO_FORCE)),
            _ => None,
        });
        Quirks {
            uniform_chunks_only: self.has(Quirk::OneChunkSize),
            max_chunk: if self.has(Quirk::SmallChunks) { Bytes::mib(256) } else { usual.max_chunk },
            settle: if self.has(Quirk::LateMapping) { Duration::from_micros(2500) } else { usual.settle },
            map_beside_kernels: usual.map_beside_kernels,
            max_pin: Some(Bytes::gib(2)),
            off,
        }
    }
}

impl fmt::Debug for InForce {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.rows().map(|row| row.quirk)).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runtime(raw: u32) -> Runtime {
        Runtime {
            version: HipVersion::from_raw(raw),
            gfx: "gfx942:sramecc+:xnack-".into(),
            drm: Some((3, 64)),
            os: "linux",
        }
    }

    fn found(runtime: &Runtime) -> InForce {
        InForce::find(runtime, false, InForce::none())
    }

    #[test]
    fn every_row_is_listed_once() {
        for (n, row) in TABLE.iter().enumerate() {
            assert!(TABLE[..n].iter().all(|other| other.quirk != row.quirk), "{:?}", row.quirk);
            assert!((row.quirk as u32) < 32);
            assert!(!row.what.is_empty() && !row.treatment.is_empty() && !row.source.is_empty());
        }
        assert_eq!(TABLE.len(), Quirk::AnyFailureIsOutOfMemory as usize + 1, "a quirk without a row");
    }

    #[test]
    fn what_is_broken_is_off_unless_forced() {
        let windows = Runtime { os: "windows", ..runtime(71_460_850) };
        for (there, quirk, words) in [
            (windows, Quirk::Windows, "on Windows "),
            (runtime(60_443_482), Quirk::NeverReturns, "ROCm 6.4.0 never"),
            (Runtime { drm: Some((3, 57)), ..runtime(71_460_850) }, Quirk::OldKernel, "(this one is 3.57)"),
            (
                Runtime { drm: None, ..runtime(71_460_850) },
                Quirk::OldKernel,
                "(this one does not say; GROWSPAN_HIP_KERNEL=3.64",
            ),
            (Runtime { gfx: "gfx1201".into(), ..runtime(71_460_850) }, Quirk::Gfx12, "(this one is gfx1201)"),
        ] {
            let usual = found(&there);
            let off = usual.for_the_crate(&there).off.unwrap();
            assert!(usual.has(quirk) && off.contains(words) && off.ends_with(super::super::HOW_TO_FORCE), "{off}");
            let forced = InForce::find(&there, true, InForce::none());
            assert_eq!(forced.for_the_crate(&there).off, None, "{quirk:?}");
            // The row itself goes and no other does.
            assert_eq!(forced.with(quirk), usual);
        }
        let old = runtime(60_032_831);
        let forced = InForce::find(&old, true, InForce::none()).for_the_crate(&old);
        assert!(forced.off.is_some_and(|off| off.starts_with("HIP has virtual memory on Linux since ROCm 6.1")));
    }

    #[test]
    fn a_row_can_be_left_out() {
        let there = runtime(70_253_211);
        let (usual, left_out) = (found(&there), InForce::none().with(Quirk::OneChunkSize));
        let without = InForce::find(&there, false, left_out);
        assert!(!without.has(Quirk::OneChunkSize) && without.with(Quirk::OneChunkSize) == usual);
    }

    /// The versions on both sides of every border in the table, with builds that exist where they decide.
    const VERSIONS: [u32; 21] = [
        50_221_153, 60_032_831, 60_140_093, 60_241_134, 60_343_482, 60_443_481, 60_443_482, 60_443_483, 60_443_484,
        60_543_482, 70_051_831, 70_152_802, 70_253_211, 70_300_000, 70_400_000, 71_300_000, 71_460_850, 71_570_000,
        71_600_000, 80_000_000, 90_000_000,
    ];

    /// Which of [`VERSIONS`] have the row, on a machine that is otherwise `like` one.
    fn marks(quirk: Quirk, like: &Runtime) -> String {
        let there = |raw| found(&Runtime { version: HipVersion::from_raw(raw), ..like.clone() }).has(quirk);
        VERSIONS.iter().map(|&raw| if there(raw) { '#' } else { '.' }).collect()
    }

    #[test]
    fn versions_get_the_rows_that_are_known_for_them() {
        // 5.2, 6.0 to 6.3, 6.4 by builds, 6.5, 7.0 to 7.4, 7.13 to 7.16, 8.0, 9.0.
        let expected = [
            (Quirk::NoVirtualMemory, "##..................."),
            (Quirk::NeverReturns, "......##............."),
            (Quirk::OneChunkSize, "..........######....."),
            (Quirk::SmallChunks, "..########..........."),
            (Quirk::CurrentDevice, "..###################"),
            (Quirk::SilentMap, "..##############....."),
            (Quirk::KeptReference, "..###########........"),
            (Quirk::KeptUnderSpan, "...........#####....."),
            (Quirk::FilePerChunk, "................#...."),
            (Quirk::MapEntryPerChunk, "..........###########"),
            (Quirk::PeersFirst, "..###################"),
            (Quirk::CopyInOneChunk, "..#.................."),
            (Quirk::AlignByHand, "..###################"),
            (Quirk::LateRelease, "..########..........."),
            (Quirk::FileForAccess, "................#####"),
            (Quirk::FreeIgnoresGraphics, "#####################"),
            (Quirk::MovedMemory, "................##..."),
            (Quirk::LostFiles, "...........####......"),
            (Quirk::AnyFailureIsOutOfMemory, "..###################"),
        ];
        for (quirk, versions) in expected {
            assert_eq!(marks(quirk, &runtime(0)), versions, "{quirk:?}");
        }
        let (ever, never) = ("#".repeat(VERSIONS.len()), ".".repeat(VERSIONS.len()));
        let by_machine = [
            (Quirk::OldKernel, Runtime { drm: Some((3, 63)), ..runtime(0) }, "................#####"),
            (Quirk::OldKernel, Runtime { drm: None, ..runtime(0) }, "................#####"),
            (Quirk::Gfx12, Runtime { gfx: "gfx1200:xnack-".into(), ..runtime(0) }, &ever),
            (Quirk::LateMapping, Runtime { gfx: "gfx1200:xnack-".into(), ..runtime(0) }, &ever),
            (Quirk::Windows, Runtime { os: "windows", ..runtime(0) }, &ever),
        ];
        for (quirk, machine, versions) in &by_machine {
            assert_eq!(marks(*quirk, machine), *versions, "{quirk:?}");
            for gfx in ["gfx942:sramecc+:xnack-", "gfx1100", "gfx1151", "gfx1250", ""] {
                assert_eq!(marks(*quirk, &Runtime { gfx: gfx.into(), ..runtime(0) }), never, "{quirk:?} on {gfx:?}");
            }
        }
        // One row is there twice.
        assert_eq!(expected.len() + by_machine.len() - 1, TABLE.len(), "a row that nothing is expected of");
    }

    #[test]
    fn previews_after_the_last_known_build_are_not_released_twice() {
        let twice = |raw| found(&runtime(raw)).has(Quirk::KeptReference);
        assert!(
            twice(70_253_211) && twice(70_253_210) && twice(70_160_000) && !twice(70_253_212) && !twice(70_260_000)
        );
    }

    #[test]
    fn kernels_are_compared_as_numbers() {
        let on = |drm, raw| found(&Runtime { drm: Some(drm), ..runtime(raw) }).has(Quirk::OldKernel);
        assert!(
            on((3, 63), 71_460_850) && on((3, 57), 71_460_850) && on((3, 9), 71_570_000) && on((2, 99), 71_460_850)
        );
        assert!(!on((3, 64), 71_460_850) && !on((4, 0), 71_460_850) && !on((3, 57), 70_253_211));
    }
}
