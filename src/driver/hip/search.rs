//! Where the runtime's library is: in this process already, or in one of the usual places.
//!
//! A framework often brings a copy of its own. Two copies in one process do not see each other's memory and streams, so
//! one that is loaded is used, whatever it is called and wherever it lies, and two are refused.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use libloading::os::unix::{Library, RTLD_LAZY};

use super::error::HipOpenError;

/// Names the library to open instead of those of the usual places.
pub(super) const LIBRARY_VARIABLE: &str = "GROWSPAN_HIP_LIBRARY";

/// By the dynamic linker's own search, the newest first; ROCm 10 has version 7 still. Plain names come with development
/// packages.
const NAMES: [&str; 3] = ["libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"];
/// It has no virtual memory but serves contiguous blocks. Only where there is no other.
const OLD: &str = "libamdhip64.so.5";

/// A copy of the runtime in this process.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Copy {
    path: PathBuf,
    /// Device and inode, as the memory map writes them: what a file is, whatever it is called.
    file: String,
    /// Another file has its name now, or none.
    replaced: bool,
}

/// The libraries to try, in this order: the one that is loaded, alone if there is one.
pub(super) fn candidates() -> Result<Vec<OsString>, HipOpenError> {
    let named = std::env::var_os(LIBRARY_VARIABLE).filter(|name| !name.is_empty());
    choose(named, &loaded(), usual)
}

/// That no second copy came into the process since.
pub(super) fn still_one() -> Result<(), HipOpenError> {
    match loaded().as_slice() {
        copies @ [_, _, ..] => Err(two(copies.iter().map(|copy| copy.path.as_path()))),
        _ => Ok(()),
    }
}

fn two<'a>(copies: impl Iterator<Item = &'a Path>) -> HipOpenError {
    HipOpenError::TwoRuntimes { copies: copies.map(|copy| copy.display().to_string()).collect() }
}

fn choose(
    named: Option<OsString>,
    loaded: &[Copy],
    usual: impl FnOnce() -> Vec<OsString>,
) -> Result<Vec<OsString>, HipOpenError> {
    let copies = loaded.iter().map(|copy| copy.path.as_path());
    let other = named.as_deref().map(Path::new).filter(|named| !loaded.iter().any(|copy| copy.is_named(named)));
    match (loaded, other) {
        ([_, _, ..], _) | ([_], Some(_)) => Err(two(copies.chain(other))),
        ([copy], None) if copy.replaced => Err(HipOpenError::Replaced { path: copy.path.display().to_string() }),
        ([copy], None) => Ok(vec![copy.path.clone().into()]),
        ([], _) => Ok(named.map_or_else(usual, |named| vec![named])),
    }
}

impl Copy {
    /// Whether the name leads to this copy. One without a folder is the linker's to find, which takes a loaded copy of
    /// that name: `libamdhip64.so.6` is the file `libamdhip64.so.6.4.60403`.
    fn is_named(&self, name: &Path) -> bool {
        if name.components().count() == 1 {
            let file = self.path.file_name().unwrap_or_default().to_string_lossy();
            return file.starts_with(&*name.to_string_lossy()) || is_loaded(name);
        }
        let id = |path| fs::metadata(path).map(|about| (about.dev(), about.ino())).ok();
        self.path == name || id(&*self.path).zip(id(name)).is_some_and(|(a, b)| a == b)
    }
}

/// Whether the linker knows a loaded library by this name, which may not be that of its file: wheels have the plain one
/// for `libamdhip64.so.7`.
fn is_loaded(name: &Path) -> bool {
    // SAFETY: with this flag nothing is loaded, so no initialiser runs.
    unsafe { Library::open(Some(name), RTLD_LAZY | libc::RTLD_NOLOAD) }.is_ok()
}

/// The copies of the runtime in this process.
fn loaded() -> Vec<Copy> {
    // Without /proc nothing is known to be loaded, and the linker still finds a copy by its name.
    runtimes_in(&fs::read_to_string("/proc/self/maps").unwrap_or_default())
}

/// The files of the runtime among those of a memory map, each once.
fn runtimes_in(maps: &str) -> Vec<Copy> {
    let mut found: Vec<Copy> = Vec::new();
    for line in maps.lines() {
        // Address, access, offset, device, inode, and the path, which may have spaces.
        let Some(at) = line.find('/') else { continue };
        let (path, replaced) = match line[at..].strip_suffix(" (deleted)") {
            Some(path) => (path, true),
            None => (&line[at..], false),
        };
        let name = Path::new(path).file_name().unwrap_or_default().to_string_lossy();
        // Wheels put a hash before the suffix: `libamdhip64-1a2b3c4d.so.6`.
        let is_runtime = name.starts_with("libamdhip64") && name.contains(".so");
        let file: String = line[..at].split_whitespace().skip(3).collect::<Vec<_>>().join(" ");
        if is_runtime && !found.iter().any(|other| other.file == file) {
            found.push(Copy { path: path.into(), file, replaced });
        }
    }
    found
}

/// All the usual places.
fn usual() -> Vec<OsString> {
    let variable = |name| std::env::var_os(name).map(PathBuf::from);
    let roots: Vec<_> = variable("ROCM_PATH").into_iter().chain([PathBuf::from("/opt/rocm")]).collect();
    let environments: Vec<_> = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(variable).collect();
    let by_linker = NAMES.iter().map(OsString::from);
    by_linker.chain(places(&roots, &environments)).chain([OLD.into()]).collect()
}

/// Under these roots of ROCm and these environments of Python.
fn places(roots: &[PathBuf], environments: &[PathBuf]) -> impl Iterator<Item = OsString> {
    let mut folders = Vec::new();
    for root in roots {
        folders.push(root.join("lib"));
        // Since 7.12 each version has a folder of its own, and which of them is `core` is up to the system.
        folders.push(root.join("core/lib"));
        let mut cores: Vec<_> = within(root).filter_map(|folder| Some((core_version(&folder)?, folder))).collect();
        cores.sort_by(|one, other| other.cmp(one));
        folders.extend(cores.into_iter().map(|(_, folder)| folder.join("lib")));
    }
    // Wheels of ROCm.
    let pythons = environments.iter().flat_map(|environment| within(&environment.join("lib")));
    folders.extend(pythons.map(|python| python.join("site-packages/_rocm_sdk_core/lib")));
    // A refusal names all that was tried.
    folders.retain(|folder| folder.is_dir());
    folders.into_iter().flat_map(|folder| NAMES.map(|name| folder.join(name).into_os_string()))
}

/// What is in a folder.
fn within(folder: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path())
}

/// The numbers of `core-7.14`.
fn core_version(folder: &Path) -> Option<Vec<u32>> {
    let numbers = folder.file_name()?.to_str()?.strip_prefix("core-")?;
    numbers.split('.').map(|number| number.parse().ok()).collect()
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
        let found = runtimes_in(MAPS);
        let expected = ["/opt/rocm-6.4.3/lib/libamdhip64.so.6.4.60403", "/srv/my env/torch.libs/libamdhip64-1a2b.so.7"];
        assert_eq!(found.iter().map(|copy| copy.path.as_path()).collect::<Vec<_>>(), expected.map(Path::new));
        assert_eq!(found.iter().map(|copy| copy.replaced).collect::<Vec<_>>(), [false, true]);
        assert!(runtimes_in("").is_empty());
        // One file by two names, as at two places where it is mounted, is one copy.
        let twice = MAPS.replace("08:01 13 /srv", "08:01 11 /srv");
        assert_eq!(runtimes_in(&twice).len(), 1);
    }

    #[test]
    fn one_that_is_loaded_is_used_and_two_are_refused() {
        let [first, second] = <[Copy; 2]>::try_from(runtimes_in(MAPS)).unwrap();
        let path = |copy: &Copy| copy.path.to_str().unwrap().to_owned();
        let usual = || vec![OsString::from("libamdhip64.so.7")];
        let chosen = |named: Option<&str>, loaded: &[Copy]| choose(named.map(OsString::from), loaded, usual);
        let one = std::slice::from_ref(&first);
        assert_eq!(chosen(None, &[]).unwrap(), usual());
        assert_eq!(chosen(Some("/a/libhip.so"), &[]).unwrap(), ["/a/libhip.so"]);
        for named in [None, Some(&*path(&first)), Some("libamdhip64.so.6"), Some("libamdhip64.so")] {
            assert_eq!(chosen(named, one).unwrap(), [first.path.as_os_str()], "{named:?}");
        }
        // The linker is asked: this is loaded, whatever its file is called.
        assert_eq!(chosen(Some("libc.so.6"), one).unwrap(), [first.path.as_os_str()]);
        let refused = [
            chosen(None, &[first.clone(), second.clone()]),
            chosen(Some(&path(&second)), one),
            chosen(Some("libamdhip64.so.7"), one),
        ];
        for (n, refused) in refused.into_iter().enumerate() {
            let error = refused.unwrap_err().to_string();
            assert!(error.contains(&path(&first)), "{error}");
            assert!(n == 2 || error.contains(&path(&second)), "{error}");
            assert!(error.contains("two HIP runtimes") && error.contains(LIBRARY_VARIABLE), "{error}");
        }
        let error = chosen(None, std::slice::from_ref(&second)).unwrap_err().to_string();
        assert!(error.contains("was replaced on disk"), "{error}");
    }

    #[test]
    fn all_places_are_looked_at_and_the_newest_version_first() {
        let root = std::env::temp_dir().join(format!("growspan-hip-places-{}", std::process::id()));
        let python = "env/lib/python3.12/site-packages/_rocm_sdk_core/lib";
        let folders =
            ["rocm/lib", "rocm/core/lib", "rocm/core-10.0/lib", "rocm/core-7.14/lib", "rocm/core-7.9/lib", python];
        for folder in folders.iter().chain(&["rocm/core-next/lib", "rocm/core-7.8", "env/lib/python3.11"]) {
            fs::create_dir_all(root.join(folder)).unwrap();
        }
        let found: Vec<_> = places(&[root.join("rocm")], &[root.join("env"), root.join("none")]).collect();
        fs::remove_dir_all(&root).unwrap();
        let expected: Vec<_> =
            folders.iter().flat_map(|folder| NAMES.map(|name| root.join(folder).join(name))).collect();
        assert_eq!(found, expected);
        let usual = usual();
        assert!(usual[..3] == NAMES && usual.last() == Some(&OLD.into()), "{usual:?}");
    }

    #[test]
    fn files_are_compared_and_not_their_names() {
        let folder = std::env::temp_dir().join(format!("growspan-hip-search-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let (file, link) = (folder.join("libamdhip64.so.7"), folder.join("libamdhip64.so"));
        fs::write(&file, b"").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        let copy = Copy { path: file.clone(), file: "08:01 15".into(), replaced: false };
        assert!(copy.is_named(&link) && !copy.is_named(&folder));
        let chosen = choose(Some(link.into()), std::slice::from_ref(&copy), Vec::new).unwrap();
        assert_eq!(chosen, [file.as_os_str()]);
        fs::remove_dir_all(&folder).unwrap();
    }
}
