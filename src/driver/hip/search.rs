//! Where the runtime's library is: in this process already, or in one of the usual places.
//!
//! A framework often brings a copy of its own. Two copies in one process do not see each other's memory and streams, so
//! one that is loaded is used, whatever it is called and wherever it lies, and two are refused.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::error::HipOpenError;

/// Names the library to open instead of those of the usual places.
pub(super) const LIBRARY_VARIABLE: &str = "GROWSPAN_HIP_LIBRARY";

/// By the dynamic linker's own search, the newest first. ROCm 10 has version 7 still. Version 5 has no virtual memory
/// but serves contiguous blocks; plain names come with development packages.
const NAMES: [&str; 4] = ["libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so", "libamdhip64.so.5"];

/// The libraries to try, in this order: the one that is loaded, alone if there is one.
pub(super) fn candidates() -> Result<Vec<OsString>, HipOpenError> {
    let named = std::env::var_os(LIBRARY_VARIABLE).filter(|name| !name.is_empty());
    choose(named, &loaded(), usual)
}

/// That no second copy came into the process since.
pub(super) fn still_one() -> Result<(), HipOpenError> {
    choose(None, &loaded(), Vec::new).map(drop)
}

fn choose(
    named: Option<OsString>,
    loaded: &[PathBuf],
    usual: impl FnOnce() -> Vec<OsString>,
) -> Result<Vec<OsString>, HipOpenError> {
    let mut copies: Vec<&Path> = loaded.iter().map(PathBuf::as_path).collect();
    if let Some(named) = named.as_deref().map(Path::new) {
        // A name without a folder is the linker's to find: it takes the loaded copy of that name if there is one.
        let same = |copy: &&Path| named.components().count() == 1 || is_same(copy, named);
        if !copies.iter().any(same) {
            copies.push(named);
        }
    }
    if copies.len() > 1 {
        let copies = copies.into_iter().map(|copy| copy.display().to_string()).collect();
        return Err(HipOpenError::TwoRuntimes { copies });
    }
    Ok(match (loaded.first(), named) {
        (Some(loaded), _) => vec![loaded.into()],
        (None, Some(named)) => vec![named],
        (None, None) => usual(),
    })
}

fn is_same(a: &Path, b: &Path) -> bool {
    let id = |path| fs::metadata(path).map(|about| (about.dev(), about.ino())).ok();
    a == b || id(a).zip(id(b)).is_some_and(|(a, b)| a == b)
}

/// The copies of the runtime in this process.
fn loaded() -> Vec<PathBuf> {
    // Without /proc nothing is known to be loaded, and the linker still finds a copy by its name.
    runtimes_in(&fs::read_to_string("/proc/self/maps").unwrap_or_default())
}

/// The files of the runtime among those of a memory map, each once.
fn runtimes_in(maps: &str) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = Vec::new();
    for line in maps.lines() {
        // Address, access, offset, device, inode, and the path, which may have spaces.
        let Some(at) = line.find('/') else { continue };
        let path = Path::new(line[at..].trim_end_matches(" (deleted)"));
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        // Wheels put a hash before the suffix: `libamdhip64-1a2b3c4d.so.6`.
        let is_runtime = name.starts_with("libamdhip64") && name.contains(".so");
        if is_runtime && !found.iter().any(|other| other == path) {
            found.push(path.to_owned());
        }
    }
    found
}

/// All the usual places.
fn usual() -> Vec<OsString> {
    let mut places: Vec<OsString> = NAMES.iter().map(OsString::from).collect();
    let rocm = std::env::var_os("ROCM_PATH").map(PathBuf::from);
    for folder in rocm.into_iter().chain([PathBuf::from("/opt/rocm")]) {
        places.extend(NAMES.iter().map(|name| folder.join("lib").join(name).into_os_string()));
    }
    // Wheels of ROCm in the active Python environment.
    let environment = std::env::var_os("VIRTUAL_ENV").map(|folder| PathBuf::from(folder).join("lib"));
    for python in environment.into_iter().flat_map(|folder| fs::read_dir(folder).into_iter().flatten().flatten()) {
        let folder = python.path().join("site-packages/_rocm_sdk_core/lib");
        if folder.is_dir() {
            places.extend(NAMES.iter().map(|name| folder.join(name).into_os_string()));
        }
    }
    places
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "\
7f0000000000-7f0000001000 r--p 00000000 08:01 11 /opt/rocm-6.4.3/lib/libamdhip64.so.6.4.60403
7f0000001000-7f0000002000 r-xp 00001000 08:01 11 /opt/rocm-6.4.3/lib/libamdhip64.so.6.4.60403
7f0000002000-7f0000003000 r--p 00000000 08:01 12 /usr/lib/x86_64-linux-gnu/libc.so.6
7f0000003000-7f0000004000 rw-p 00000000 00:00 0 [heap]
7f0000004000-7f0000005000 r--p 00000000 08:01 13 /srv/my env/torch.libs/libamdhip64-1a2b.so.7 (deleted)
7f0000005000-7f0000006000 r--p 00000000 08:01 14 /usr/share/doc/libamdhip64/readme
";

    #[test]
    fn runtimes_are_found_by_whatever_name() {
        let expected = ["/opt/rocm-6.4.3/lib/libamdhip64.so.6.4.60403", "/srv/my env/torch.libs/libamdhip64-1a2b.so.7"];
        assert_eq!(runtimes_in(MAPS), expected.map(PathBuf::from));
        assert!(runtimes_in("").is_empty());
    }

    #[test]
    fn one_that_is_loaded_is_used_and_two_are_refused() {
        let [first, second] = <[PathBuf; 2]>::try_from(runtimes_in(MAPS)).unwrap();
        let usual = || vec![OsString::from("libamdhip64.so.7")];
        let chosen = |named: Option<&str>, loaded: &[PathBuf]| choose(named.map(OsString::from), loaded, usual);
        assert_eq!(chosen(None, &[]).unwrap(), usual());
        assert_eq!(chosen(Some("/a/libhip.so"), &[]).unwrap(), ["/a/libhip.so"]);
        assert_eq!(chosen(None, std::slice::from_ref(&first)).unwrap(), [first.as_os_str()]);
        assert_eq!(chosen(first.to_str(), std::slice::from_ref(&first)).unwrap(), [first.as_os_str()]);
        assert_eq!(chosen(Some("libamdhip64.so.6"), std::slice::from_ref(&first)).unwrap(), [first.as_os_str()]);
        for refused in
            [chosen(None, &[first.clone(), second.clone()]), chosen(second.to_str(), std::slice::from_ref(&first))]
        {
            let error = refused.unwrap_err().to_string();
            assert!(error.contains(first.to_str().unwrap()) && error.contains(second.to_str().unwrap()), "{error}");
            assert!(error.contains("two HIP runtimes") && error.contains(LIBRARY_VARIABLE), "{error}");
        }
    }

    #[test]
    fn files_are_compared_and_not_their_names() {
        let folder = std::env::temp_dir().join(format!("growspan-hip-search-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let (file, link) = (folder.join("libamdhip64.so.7"), folder.join("libamdhip64.so"));
        fs::write(&file, b"").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        assert!(is_same(&file, &link) && !is_same(&file, &folder));
        let chosen = choose(Some(link.into()), std::slice::from_ref(&file), Vec::new).unwrap();
        assert_eq!(chosen, [file.as_os_str()]);
        fs::remove_dir_all(&folder).unwrap();
    }
}
