//! Every version that the stand-in can be: virtual memory works, or is off with the exact reason; and whichever it is,
//! the crate keeps its promises.

use core::time::Duration;
use std::sync::Arc;

use growspan::driver::hip::{HipDriver, HipOptions};
use growspan::{Device, DeviceOptions, Granularity, GrowableBuffer, Mode, Quiesce};

use crate::child::Child;

/// A version, and the reason why virtual memory is off: as it comes, and where the recommended granularity does not
/// decide. Empty where it is on.
struct Expected {
    personality: &'static str,
    as_it_comes: &'static str,
    in_2_mib: &'static str,
    /// Whether its chunks can be shared.
    shares: bool,
}

const NO_VIRTUAL_MEMORY: &str = "HIP has virtual memory on Linux since ROCm 6.1; before, reserving returns success and a \
                                 null address (HIP runtime 5.7.31921)";
const NEVER_RETURNS: &str = "ROCm 6.4.0 never gives released memory back, and 6.4.1 is not known to; GROWSPAN_HIP_FORCE=1 lets the check \
                             decide (HIP runtime 6.4.43482)";
const RDNA4: &str = "on RDNA4 (gfx1200 and gfx1201) mappings come late, lose writes and were seen to hang the card (this one is \
                     gfx1201); GROWSPAN_HIP_FORCE=1 lets the check decide (HIP runtime 7.14.60850)";
const OLD_KERNEL: &str = "ROCm 7.14 and newer hang when access is granted on kernels whose amdgpu driver is older than \
                          3.64 (this one is 3.57); GROWSPAN_HIP_FORCE=1 lets the check decide (HIP runtime 7.14.60850)";

const ALL: [Expected; 12] = [
    Expected { personality: "5.7", as_it_comes: NO_VIRTUAL_MEMORY, in_2_mib: NO_VIRTUAL_MEMORY, shares: false },
    Expected {
        personality: "6.1",
        as_it_comes: "the recommended allocation granularity is 4 KiB, not 2 MiB or more (HIP runtime 6.1.40093)",
        in_2_mib: "",
        shares: false,
    },
    Expected { personality: "6.4.0", as_it_comes: NEVER_RETURNS, in_2_mib: NEVER_RETURNS, shares: false },
    Expected {
        personality: "6.4.3",
        as_it_comes: "the recommended allocation granularity is 4 KiB, not 2 MiB or more (HIP runtime 6.4.43484)",
        in_2_mib: "",
        shares: true,
    },
    Expected {
        personality: "7.2.4",
        as_it_comes: "the recommended allocation granularity is 4 KiB, not 2 MiB or more (HIP runtime 7.2.53211)",
        in_2_mib: "",
        shares: true,
    },
    Expected {
        personality: "7.10",
        as_it_comes: "the recommended allocation granularity is 4 KiB, not 2 MiB or more (HIP runtime 7.2.53210)",
        in_2_mib: "",
        shares: true,
    },
    Expected { personality: "7.12", as_it_comes: "", in_2_mib: "", shares: true },
    Expected { personality: "7.13", as_it_comes: "", in_2_mib: "", shares: true },
    Expected { personality: "7.14.1", as_it_comes: "", in_2_mib: "", shares: true },
    Expected { personality: "10.0", as_it_comes: "", in_2_mib: "", shares: true },
    Expected { personality: "gfx1201", as_it_comes: RDNA4, in_2_mib: RDNA4, shares: false },
    Expected { personality: "old-drm", as_it_comes: OLD_KERNEL, in_2_mib: OLD_KERNEL, shares: false },
];

fn expected() -> &'static Expected {
    let name = std::env::var("FAKE_AMDHIP").unwrap();
    ALL.iter().find(|expected| expected.personality == name).unwrap()
}

/// Whether any of the devices must have virtual memory, so that no test passes for want of one.
pub(crate) fn expects_virtual_memory() -> bool {
    expected().in_2_mib.is_empty()
}

/// Whether any of them must take chunks of mixed sizes, which HIP 7.0 to 7.13 does not.
pub(crate) fn expects_a_ladder() -> bool {
    expects_virtual_memory() && !matches!(expected().personality, "7.2.4" | "7.10" | "7.12" | "7.13")
}

/// How this process's personality is opened.
pub(crate) fn hip_options() -> HipOptions {
    match std::env::var("FAKE_AMDHIP").as_deref() {
        // There is no kernel driver here to ask.
        Ok("old-drm") => HipOptions::new().kernel_driver(3, 57),
        _ => HipOptions::new(),
    }
}

fn open(options: DeviceOptions) -> Device {
    options.open(Arc::new(HipDriver::open_with(0, hip_options()).unwrap())).unwrap()
}

pub(crate) fn the_verdict_is_the_expected_one() {
    let expected = expected();
    let all = DeviceOptions::new().granularity(Granularity::AtLeast2MiB);
    for (options, text) in [(DeviceOptions::new(), expected.as_it_comes), (all, expected.in_2_mib)] {
        let device = open(options);
        let verdict = device.verdict();
        println!("{}", verdict.report());
        let reason = verdict.reason().map(ToString::to_string);
        assert_eq!(reason.as_deref().unwrap_or_default(), text);
        assert_eq!(verdict.mode(), if text.is_empty() { Mode::Virtual } else { Mode::Contiguous });
        let mut buffer = GrowableBuffer::<u32>::builder(&device).max_len(1 << 20).build().unwrap();
        buffer.append(&[1, 2, 3]).unwrap();
        let mut back = [0; 3];
        buffer.copy_out(0, &mut back).unwrap();
        assert_eq!(back, [1, 2, 3]);
        buffer.shrink_to(0, Quiesce::Device).unwrap();
        buffer.close().unwrap();
    }
}

/// All promises in a process of that personality.
fn keeps_all_promises(personality: &str) {
    let ended = Child::of(personality).set("FAKE_AMDHIP_DEVICES", "5").tests(&["promises::"]);
    let summary = ended.text.lines().filter(|line| line.starts_with("test ")).collect::<Vec<_>>().join("\n");
    assert!(ended.status.is_some_and(|status| status.success()), "{:?}\n{}", ended.status, ended.text);
    assert!(summary.matches(" ... ok").count() >= 20 && !summary.contains("FAILED"), "{summary}");
    println!("{personality}: {:?}\n{summary}", ended.took);
    let shares = ALL.iter().any(|expected| expected.personality == personality && expected.shares);
    if shares {
        let ended = Child::of(personality).tests(&["sharing::"]);
        assert!(ended.status.is_some_and(|status| status.success()), "{:?}\n{}", ended.status, ended.text);
        assert!(ended.text.contains("1 passed"), "{}", ended.text);
    }
}

macro_rules! personalities {
    ($($name:ident: $personality:literal,)*) => {
        $( #[test] fn $name() { keeps_all_promises($personality); } )*

        #[test]
        fn none_is_left_out() {
            assert_eq!([$($personality),*], ALL.map(|expected| expected.personality));
        }
    };
}

personalities! {
    rocm_5_7_runs_in_one_piece: "5.7",
    rocm_6_1: "6.1",
    rocm_6_4_0_runs_in_one_piece: "6.4.0",
    rocm_6_4_3: "6.4.3",
    rocm_7_2_4: "7.2.4",
    rocm_7_10: "7.10",
    rocm_7_12: "7.12",
    rocm_7_13: "7.13",
    rocm_7_14_1: "7.14.1",
    rocm_10_0: "10.0",
    rdna4_runs_in_one_piece: "gfx1201",
    an_old_kernel_runs_in_one_piece: "old-drm",
}

/// What hangs in an old kernel would take the runtime's plain allocations with it.
#[test]
fn a_kernel_that_does_not_say_what_it_is_is_not_tried() {
    for (personality, off) in [("7.14.1", true), ("10.0", true), ("7.2.4", false)] {
        let text = Child::of(personality).set("GROWSPAN_HIP_KERNEL", "").role_well("devices forced");
        let words =
            "(this one does not say; GROWSPAN_HIP_KERNEL=3.64 says that it is that or newer); GROWSPAN_HIP_FORCE=1";
        assert_eq!(text.contains(words), off, "{text}");
        assert_eq!(text.contains("verdict: virtual"), !off, "{text}");
    }
    let text = Child::of("7.14.1").set("GROWSPAN_HIP_KERNEL", "new").role_well("devices forced");
    assert!(text.contains("GROWSPAN_HIP_KERNEL=new is no version") && text.contains("this one does not say"), "{text}");
    let text = Child::of("7.14.1").set("GROWSPAN_HIP_KERNEL", "3.63").role_well("devices forced");
    assert!(text.contains("(this one is 3.63)"), "{text}");
}

#[test]
fn a_runtime_that_hangs_does_not_hang_the_program() {
    let text = Child::of("old-drm").role_well("devices hang");
    assert!(text.contains("setting access: the driver did not return within 0.3 s (HIP runtime 7.14.60850)"), "{text}");
    assert!(text.contains("allocating: ") && text.contains("in its virtual memory: set access hangs"), "{text}");
}

/// What is forced is left to the check, which finds the fault of 6.4.0 and lets RDNA4 pass.
#[test]
fn what_is_forced_is_left_to_the_check() {
    let text = Child::of("6.4.0").set("GROWSPAN_HIP_FORCE", "1").role_well("devices forced");
    let memory = "the free VRAM fell by 32 MiB for 32 MiB mapped and rose by 0 MiB after its release (HIP runtime \
                  6.4.43482)";
    assert!(text.contains(memory), "{text}");
    let text = Child::of("gfx1201").set("GROWSPAN_HIP_FORCE", "1").role_well("devices forced");
    assert!(text.contains("verdict: virtual"), "{text}");
    let text = Child::of("5.7").set("GROWSPAN_HIP_FORCE", "1").role_well("devices forced");
    assert!(text.contains(NO_VIRTUAL_MEMORY), "{text}");
}

/// As on a kernel whose driver is too old for it, whatever the runtime's version.
#[test]
fn a_runtime_that_says_it_has_no_virtual_memory_is_believed() {
    for personality in ["6.4.3", "7.2.4", "7.14.1", "10.0"] {
        let text = Child::of(personality).set("HIP_VMEM_MANAGE_SUPPORT", "0").role_well("devices forced");
        let reason = "hipDeviceAttributeVirtualMemoryManagementSupported is 0 (an old kernel driver, or";
        assert!(text.contains("verdict: ") && text.contains(reason), "{personality}: {text}");
    }
}

pub(crate) fn hang() {
    // Of a kernel that is said to be new enough, and is not.
    let driver = HipDriver::open(0).unwrap();
    let device = DeviceOptions::new().patience(Duration::from_millis(300)).open(Arc::new(driver)).unwrap();
    println!("{}", device.verdict().reason().unwrap());
    let build = || GrowableBuffer::<u8>::builder(&device).max_len(1 << 20).build()?.append(b"still here");
    println!("allocating: {}", build().unwrap_err());
}

pub(crate) fn forced() {
    let driver = HipDriver::open(0).unwrap();
    let options = DeviceOptions::new().granularity(Granularity::AtLeast2MiB);
    let device = options.open(Arc::new(driver)).unwrap();
    match device.verdict().reason() {
        Some(reason) => println!("verdict: {reason}"),
        None => println!("verdict: virtual"),
    }
}
