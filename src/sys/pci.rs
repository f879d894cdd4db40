//! What the kernel says of a graphics card, by its place on the PCI bus.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

/// A card's folder in the kernel's tree.
#[derive(Clone, Debug)]
pub(crate) struct Card {
    folder: PathBuf,
}

/// Memory of a card, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct VideoMemory {
    pub(crate) used: u64,
    pub(crate) total: u64,
}

impl Card {
    /// The card at `place` (`0000:03:00.0`), with the kernel's tree mounted at `sysfs`.
    pub(crate) fn at(sysfs: &Path, place: &str) -> Self {
        Self { folder: sysfs.join("bus/pci/devices").join(place.to_ascii_lowercase()) }
    }

    /// What amdgpu says is used, by all programs and for all purposes.
    pub(crate) fn memory(&self) -> Option<VideoMemory> {
        let read = |name| fs::read_to_string(self.folder.join(name)).ok()?.trim().parse().ok();
        Some(VideoMemory { used: read("mem_info_vram_used")?, total: read("mem_info_vram_total")? })
    }

    /// The version of the kernel's driver for the card, if that is amdgpu and the process may open it.
    pub(crate) fn amdgpu_version(&self) -> Option<(u32, u32)> {
        nodes_in(&self.folder.join("drm")).find_map(|node| amdgpu_at(&node))
    }
}

/// The version of the kernel's amdgpu driver, by whichever card's node the process may open: there is one for all cards.
/// The parts of a divided card have places on the bus that the kernel's tree does not know.
pub(crate) fn amdgpu_version() -> Option<(u32, u32)> {
    nodes_in(Path::new("/dev/dri")).find_map(|node| amdgpu_at(&node))
}

/// A version as it is written: `3.64`, with or without a third number.
pub(crate) fn version_in(text: &str) -> Option<(u32, u32)> {
    let mut numbers = text.trim().split('.').map(str::parse);
    match (numbers.next()?, numbers.next()?) {
        (Ok(major), Ok(minor)) if numbers.all(|number| number.is_ok()) => Some((major, minor)),
        _ => None,
    }
}

/// The names of the render nodes in a folder.
fn nodes_in(folder: &Path) -> impl Iterator<Item = OsString> + use<> {
    let names = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.file_name());
    names.filter(|name| name.to_string_lossy().starts_with("renderD"))
}

fn amdgpu_at(node: &OsStr) -> Option<(u32, u32)> {
    let version = drm_version(&File::open(Path::new("/dev/dri").join(node)).ok()?).ok()?;
    (version.name == *b"amdgpu").then_some((version.major, version.minor))
}

/// The kernel's `struct drm_version`, which holds lengths and buffers for three texts.
#[repr(C)]
struct RawVersion {
    major: libc::c_int,
    minor: libc::c_int,
    patch: libc::c_int,
    name_len: usize,
    name: *mut u8,
    date_len: usize,
    date: *mut u8,
    desc_len: usize,
    desc: *mut u8,
}

/// `DRM_IOCTL_VERSION`: `_IOWR('d', 0, struct drm_version)`, from the kernel's `drm.h`.
const DRM_IOCTL_VERSION: u64 = 0xc000_6400 | (size_of::<RawVersion>() as u64) << 16;

const _: () = assert!(size_of::<RawVersion>() == 64);

#[derive(Debug)]
struct DrmVersion {
    major: u32,
    minor: u32,
    name: Vec<u8>,
}

fn drm_version(node: &File) -> io::Result<DrmVersion> {
    let mut name = [0_u8; 32];
    let mut raw = RawVersion {
        major: 0,
        minor: 0,
        patch: 0,
        name_len: name.len(),
        name: name.as_mut_ptr(),
        date_len: 0,
        date: core::ptr::null_mut(),
        desc_len: 0,
        desc: core::ptr::null_mut(),
    };
    // SAFETY: the structure has the kernel's layout and size, which the request's number says too; the name's buffer is
    // as long as announced, and of the other texts none is wanted. A file that is no such device refuses the request.
    if unsafe { libc::ioctl(node.as_raw_fd(), DRM_IOCTL_VERSION as _, &raw mut raw) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let len = raw.name_len.min(name.len());
    Ok(DrmVersion { major: raw.major.unsigned_abs(), minor: raw.minor.unsigned_abs(), name: name[..len].to_vec() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_card_s_memory_is_read_from_its_folder() {
        let root = std::env::temp_dir().join(format!("growspan-pci-{}", std::process::id()));
        let folder = root.join("bus/pci/devices/0000:0a:00.0");
        fs::create_dir_all(&folder).unwrap();
        let card = Card::at(&root, "0000:0A:00.0");
        assert_eq!(card.memory(), None);
        fs::write(folder.join("mem_info_vram_used"), "4096\n").unwrap();
        fs::write(folder.join("mem_info_vram_total"), "8192\n").unwrap();
        assert_eq!(card.memory(), Some(VideoMemory { used: 4096, total: 8192 }));
        assert_eq!(card.amdgpu_version(), None);
        fs::remove_dir_all(&root).unwrap();
    }

    #[test]
    fn render_nodes_are_told_from_other_files() {
        let folder = std::env::temp_dir().join(format!("growspan-dri-{}", std::process::id()));
        fs::create_dir_all(folder.join("by-path")).unwrap();
        for name in ["card0", "renderD128", "controlD64", "renderD129"] {
            fs::write(folder.join(name), "").unwrap();
        }
        let mut found: Vec<_> = nodes_in(&folder).collect();
        found.sort();
        assert_eq!(found, ["renderD128", "renderD129"]);
        fs::remove_dir_all(&folder).unwrap();
        assert_eq!(nodes_in(&folder).count(), 0);
        assert_eq!(amdgpu_at(OsStr::new("../null")), None);
    }

    #[test]
    fn versions_are_read_as_they_are_written() {
        assert_eq!(version_in("3.64"), Some((3, 64)));
        assert_eq!(version_in(" 3.9.0\n"), Some((3, 9)));
        for bad in ["", "3", "3.", ".64", "3.x", "3.64.x", "-3.64", "three"] {
            assert_eq!(version_in(bad), None, "{bad}");
        }
    }

    #[test]
    fn what_is_no_card_has_no_version() {
        assert_eq!(DRM_IOCTL_VERSION, 0xc040_6400);
        assert!(drm_version(&File::open("/dev/null").unwrap()).is_err());
    }
}
