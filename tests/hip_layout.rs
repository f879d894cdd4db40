//! Our types and constants of the HIP runtime are those of its header: as `hip-sys` has it (HIP 5.4), as `cubecl-hip-sys`
//! has it (the newest, or what an installed `hipconfig` names), and as it is installed, if it is:
//!
//! ```text
//! HIP_INCLUDE=/opt/rocm/include cargo test --test hip_layout -- --ignored --nocapture
//! ```
#![cfg(feature = "hip")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails, in its helpers too")]

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::mem::{align_of, offset_of, size_of};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs, process};

use growspan::driver::hip::ffi;

/// Constants: the header's enumeration, and what `cubecl-hip-sys` calls them. `defines` are in no enumeration.
macro_rules! constants {
    ($each:ident $($more:tt)*) => {
        $each! {
            $($more)*;
            [hipError_t]
            hipSuccess = hipError_t_hipSuccess,
            hipErrorInvalidValue = hipError_t_hipErrorInvalidValue,
            hipErrorOutOfMemory = hipError_t_hipErrorOutOfMemory,
            hipErrorNotInitialized = hipError_t_hipErrorNotInitialized,
            hipErrorDeinitialized = hipError_t_hipErrorDeinitialized,
            hipErrorInsufficientDriver = hipError_t_hipErrorInsufficientDriver,
            hipErrorNoDevice = hipError_t_hipErrorNoDevice,
            hipErrorInvalidDevice = hipError_t_hipErrorInvalidDevice,
            hipErrorNotReady = hipError_t_hipErrorNotReady,
            hipErrorNotSupported = hipError_t_hipErrorNotSupported,
            hipErrorStreamCaptureImplicit = hipError_t_hipErrorStreamCaptureImplicit;
            [hipDeviceAttribute_t]
            hipDeviceAttributeIntegrated = hipDeviceAttribute_t_hipDeviceAttributeIntegrated,
            hipDeviceAttributeComputeCapabilityMajor = hipDeviceAttribute_t_hipDeviceAttributeComputeCapabilityMajor,
            hipDeviceAttributeComputeCapabilityMinor = hipDeviceAttribute_t_hipDeviceAttributeComputeCapabilityMinor,
            hipDeviceAttributeVirtualMemoryManagementSupported =
                hipDeviceAttribute_t_hipDeviceAttributeVirtualMemoryManagementSupported;
            [hipMemAllocationType]
            hipMemAllocationTypePinned = hipMemAllocationType_hipMemAllocationTypePinned;
            [hipMemLocationType]
            hipMemLocationTypeDevice = hipMemLocationType_hipMemLocationTypeDevice;
            [hipMemAllocationHandleType]
            hipMemHandleTypeNone = hipMemAllocationHandleType_hipMemHandleTypeNone,
            hipMemHandleTypePosixFileDescriptor = hipMemAllocationHandleType_hipMemHandleTypePosixFileDescriptor;
            [hipMemAccessFlags]
            hipMemAccessFlagsProtReadWrite = hipMemAccessFlags_hipMemAccessFlagsProtReadWrite;
            [hipMemAllocationGranularity_flags]
            hipMemAllocationGranularityMinimum = hipMemAllocationGranularity_flags_hipMemAllocationGranularityMinimum,
            hipMemAllocationGranularityRecommended =
                hipMemAllocationGranularity_flags_hipMemAllocationGranularityRecommended;
            [hipStreamCaptureMode]
            hipStreamCaptureModeRelaxed = hipStreamCaptureMode_hipStreamCaptureModeRelaxed;
            [hipStreamCaptureStatus]
            hipStreamCaptureStatusNone = hipStreamCaptureStatus_hipStreamCaptureStatusNone;
            [defines]
            hipStreamNonBlocking = hipStreamNonBlocking,
            hipEventDisableTiming = hipEventDisableTiming,
            hipHostMallocPortable = hipHostMallocPortable,
            hipHostMallocMapped = hipHostMallocMapped,
            hipHostMallocWriteCombined = hipHostMallocWriteCombined,
            hipHostRegisterPortable = hipHostRegisterPortable,
            hipHostRegisterMapped = hipHostRegisterMapped;
        }
    };
}

/// Types with all of their fields: ours, and the header's.
macro_rules! types {
    ($each:ident $($more:tt)*) => {
        $each! {
            $($more)*;
            hipError_t {}
            hipDeviceptr_t {}
            hipStream_t {}
            hipEvent_t {}
            hipMemGenericAllocationHandle_t {}
            hipMemLocation { type_ = type_, id = id }
            hipMemAllocationProp {
                type_ = type_,
                location = location,
                win32_handle_meta_data = win32HandleMetaData,
                alloc_flags = allocFlags,
                alloc_flags.compression_type = allocFlags.compressionType,
                alloc_flags.gpu_direct_rdma_capable = allocFlags.gpuDirectRDMACapable,
                alloc_flags.usage = allocFlags.usage
            }
            hipMemAccessDesc { location = location, flags = flags }
        }
    };
}

/// What the bindings of 7.x have in a union that they name themselves, and C and older bindings have as a plain field.
macro_rules! of_the_union {
    ($each:ident $($more:tt)*) => {
        $each! { $($more)*; hipMemAllocationProp { requested_handle_type = requestedHandleType } }
    };
}

/// What came with 6.0. Ours has room to spare, so that its size is another matter.
macro_rules! properties {
    ($each:ident $($more:tt)*) => {
        $each! { $($more)*; hipDeviceProp_tR0600 { name = name, uuid = uuid, gcn_arch_name = gcnArchName } }
    };
}

/// Numbers by what they are of, in the header's words.
type Facts = BTreeMap<String, u64>;

/// The size of what a field holds.
fn width<S, F>(_: fn(&S) -> &F) -> usize {
    size_of::<F>()
}

fn note(facts: &mut Facts, what: &str, number: usize) {
    facts.insert(what.to_owned(), number as u64);
}

fn note_field(facts: &mut Facts, field: &str, offset: usize, width: usize) {
    // In C the field is `type`, which is a word of Rust's own.
    let field = field.replace("type_", "type");
    note(facts, &format!("{field} at"), offset);
    note(facts, &format!("{field} wide"), width);
}

/// Sizes and alignments of types whose names are looked up where this is used.
macro_rules! note_sizes {
    ($facts:ident; $($type:ident { $($fields:tt)* })*) => { $(
        note(&mut $facts, concat!(stringify!($type), " size"), size_of::<$type>());
        note(&mut $facts, concat!(stringify!($type), " align"), align_of::<$type>());
    )* };
}

macro_rules! note_our_fields {
    ($facts:ident; $($type:ident { $($($ours:ident).+ = $($theirs:ident).+),* })*) => { $( $( note_field(
        &mut $facts,
        concat!(stringify!($type), ".", stringify!($($theirs).+)),
        offset_of!(ffi::$type, $($ours).+),
        width(|it: &ffi::$type| &it.$($ours).+),
    ); )* )* };
}

/// The same, of types whose names are looked up where this is used.
macro_rules! note_their_fields {
    ($facts:ident; $($type:ident { $($($ours:ident).+ = $($theirs:ident).+),* })*) => { $( $( note_field(
        &mut $facts,
        concat!(stringify!($type), ".", stringify!($($theirs).+)),
        offset_of!($type, $($theirs).+),
        width(|it: &$type| &it.$($theirs).+),
    ); )* )* };
}

/// All that we have.
fn ours() -> Facts {
    macro_rules! values {
        ($facts:ident; $( [$enumeration:ident] $($name:ident = $flat:ident),*; )*) => { $( $(
            note(&mut $facts, stringify!($name), ffi::$name as usize);
        )* )* };
    }
    use ffi::*;
    let mut facts = Facts::new();
    constants!(values facts);
    types!(note_sizes facts);
    types!(note_our_fields facts);
    of_the_union!(note_our_fields facts);
    properties!(note_our_fields facts);
    facts
}

fn assert_same(ours: &Facts, theirs: &Facts) {
    let differences: Vec<_> = ours
        .keys()
        .chain(theirs.keys())
        .collect::<BTreeSet<_>>()
        .into_iter()
        .filter(|what| ours.get(*what) != theirs.get(*what))
        .map(|what| format!("{what}: ours {:?}, theirs {:?}", ours.get(what), theirs.get(what)))
        .collect();
    assert!(differences.is_empty(), "{differences:#?}");
}

#[test]
fn all_is_as_in_hip_5_4() {
    macro_rules! values {
        ($facts:ident; $( [$enumeration:ident] $($name:ident = $flat:ident),*; )*) => { $( $(
            note(&mut $facts, stringify!($name), $enumeration::$name as usize);
        )* )* };
    }
    use hip_sys::hiprt::{self as defines, *};
    let mut theirs = Facts::new();
    constants!(values theirs);
    types!(note_sizes theirs);
    types!(note_their_fields theirs);
    of_the_union!(note_their_fields theirs);
    let mut ours = ours();
    ours.retain(|what, _| !what.starts_with("hipDeviceProp_tR0600"));
    assert_same(&ours, &theirs);
}

/// What the names of `cubecl-hip-sys` mean where it has no bindings for the HIP that is installed, and is empty.
#[allow(
    non_camel_case_types,
    non_upper_case_globals,
    non_snake_case,
    dead_code,
    reason = "named as the bindings name them"
)]
mod absent {
    #[allow(unused_imports, reason = "only where there are no bindings")]
    pub(super) use hip_sys::hiprt::*;

    pub(super) const HIP_VERSION: u32 = 0;

    macro_rules! values {
        (; $( [$enumeration:ident] $($name:ident = $flat:ident),*; )*) => { $( $(
            pub(super) const $flat: u32 = u32::MAX;
        )* )* };
    }
    constants!(values);

    pub(super) struct hipDeviceProp_tR0600 {
        pub(super) name: u8,
        pub(super) uuid: u8,
        pub(super) gcnArchName: u8,
    }
}

#[test]
#[allow(unused_imports, reason = "one of the two, by which there is")]
fn all_is_as_in_the_newest_bindings() {
    macro_rules! values {
        ($facts:ident; $( [$enumeration:ident] $($name:ident = $flat:ident),*; )*) => { $( $(
            note(&mut $facts, stringify!($name), $flat as usize);
        )* )* };
    }
    use absent::*;
    // Its build script chooses bindings by the patch number that `hipconfig` prints; it knows eleven, and for another one
    // it exports nothing. An inner import goes before an outer one, so that this compiles in either case.
    {
        use cubecl_hip_sys::*;
        println!("HIP {HIP_VERSION}");
        if HIP_VERSION == absent::HIP_VERSION {
            println!("nothing to compare with: cubecl-hip-sys has no bindings for what hipconfig names");
            return;
        }
        let mut theirs = Facts::new();
        constants!(values theirs);
        types!(note_sizes theirs);
        types!(note_their_fields theirs);
        properties!(note_their_fields theirs);
        let mut ours = ours();
        ours.retain(|what, _| !what.contains("requestedHandleType"));
        assert_same(&ours, &theirs);
        assert!(size_of::<ffi::hipDeviceProp_tR0600>() >= size_of::<hipDeviceProp_tR0600>());
    }
}

/// The folder that has `hip/hip_runtime_api.h`.
fn include() -> PathBuf {
    let named = env::var_os("HIP_INCLUDE").map(PathBuf::from);
    let rocm = env::var_os("ROCM_PATH").map(|root| Path::new(&root).join("include"));
    let places: Vec<_> =
        named.into_iter().chain(rocm).chain(["/opt/rocm/include", "/usr/include"].map(PathBuf::from)).collect();
    let found = places.iter().find(|place| place.join("hip/hip_runtime_api.h").is_file());
    found
        .cloned()
        .unwrap_or_else(|| panic!("no hip/hip_runtime_api.h in any of {places:?}; HIP_INCLUDE names a folder"))
}

/// From which version of HIP on a fact holds. That of our types begins with 5.4, before the first with virtual memory.
fn since(what: &str) -> u32 {
    match what {
        _ if what.starts_with("hipDeviceProp_tR0600") => 60_000_000,
        _ if what.starts_with("hipMemAllocationProp.") => 50_400_000,
        "hipDeviceAttributeVirtualMemoryManagementSupported" => 50_400_000,
        _ => 0,
    }
}

/// A C program that prints the same facts.
fn program<'a>(facts: impl Iterator<Item = &'a str>) -> String {
    let mut program = "#include <stddef.h>\n#include <stdio.h>\n#include <hip/hip_runtime_api.h>\n".to_owned();
    program += "#define SAY(what, number) printf(\"%s=%llu\\n\", what, (unsigned long long)(number));\n";
    program += "int main(void) {\nSAY(\"HIP_VERSION\", HIP_VERSION)\n";
    for what in facts.chain(["hipDeviceProp_tR0600 size"]) {
        let (subject, question) = what.split_once(' ').unwrap_or((what, "value"));
        let (of, field) = subject.split_once('.').unwrap_or((subject, ""));
        let number = match question {
            "value" => subject.to_owned(),
            "size" => format!("sizeof({of})"),
            "align" => format!("_Alignof({of})"),
            "at" => format!("offsetof({of}, {field})"),
            "wide" => format!("sizeof((({of} *)0)->{field})"),
            _ => panic!("{question}: not a question that C can answer here"),
        };
        let since = since(what);
        writeln!(program, "#if HIP_VERSION >= {since}\nSAY(\"{what}\", {number})\n#endif").unwrap();
    }
    program + "return 0; }\n"
}

#[test]
#[ignore = "needs a C compiler and HIP's header: in HIP_INCLUDE, $ROCM_PATH/include, /opt/rocm/include or /usr/include"]
fn all_is_as_in_the_installed_header() {
    let (include, mut ours) = (include(), ours());
    let folder = env::temp_dir().join(format!("growspan-hip-layout-{}", process::id()));
    fs::create_dir_all(&folder).unwrap();
    let (source, binary) = (folder.join("facts.c"), folder.join("facts"));
    fs::write(&source, program(ours.keys().map(String::as_str))).unwrap();
    let built = Command::new("cc")
        .args(["-D__HIP_PLATFORM_AMD__", "-w", "-I"])
        .arg(&include)
        .arg(&source)
        .arg("-o")
        .arg(&binary)
        .output()
        .expect("cc is a C compiler");
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let said = Command::new(&binary).output().unwrap();
    fs::remove_dir_all(&folder).unwrap();
    let said = String::from_utf8(said.stdout).unwrap();
    let mut theirs: Facts = said
        .lines()
        .filter_map(|line| line.split_once('='))
        .map(|(what, number)| (what.to_owned(), number.parse().unwrap()))
        .collect();

    let version = u32::try_from(theirs.remove("HIP_VERSION").unwrap()).unwrap();
    println!("HIP {version} in {}", include.display());
    if version < 50_400_000 {
        println!("5.2 differs, as is known: hipMemAllocationProp has its fields in another order there");
    }
    let room = size_of::<ffi::hipDeviceProp_tR0600>() as u64;
    let needed = theirs.remove("hipDeviceProp_tR0600 size").unwrap_or(0);
    assert!(room >= needed, "hipDeviceProp_tR0600: room for {room} bytes, and the header's has {needed}");
    ours.retain(|what, _| since(what) <= version);
    assert_same(&ours, &theirs);
}

#[test]
fn nothing_of_ours_is_left_out() {
    macro_rules! names {
        ($names:ident; $( [$enumeration:ident] $($name:ident = $flat:ident),*; )*) => { $( $(
            $names.insert(stringify!($name).to_owned());
        )* )* };
        ($names:ident; $($type:ident { $($($ours:ident).+ = $($theirs:ident).+),* })*) => { $(
            $names.insert(stringify!($type).to_owned());
            $( $names.insert(concat!(stringify!($type), ".", stringify!($($ours).+)).to_owned()); )*
        )* };
    }
    let mut compared = BTreeSet::new();
    constants!(names compared);
    types!(names compared);
    of_the_union!(names compared);
    properties!(names compared);

    let (mut structure, mut missing) = (String::new(), Vec::new());
    for line in include_str!("../src/driver/hip/ffi.rs").lines() {
        let Some((kind, rest)) = line.trim_start().strip_prefix("pub ").and_then(|it| it.split_once(' ')) else {
            continue;
        };
        let name: String = rest.chars().take_while(|it| it.is_alphanumeric() || *it == '_').collect();
        let name = match kind {
            "const" if name == "fn" => continue,
            "const" | "type" => name,
            "struct" => {
                // The header has no name for it, so that its fields are looked at in the place where it is used.
                structure = name.replace("hipMemAllocationFlags", "hipMemAllocationProp.alloc_flags");
                structure.clone()
            }
            field => format!("{structure}.{}", field.trim_end_matches(':')),
        };
        if !compared.contains(&name) {
            missing.push(name);
        }
    }
    assert!(missing.is_empty(), "in ffi.rs, and compared with nothing: {missing:?}");
}
