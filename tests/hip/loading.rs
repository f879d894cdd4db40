//! Which copy of the runtime is used, and why there is none.

use std::fs;
use std::path::{Path, PathBuf};

use growspan::Device;
use growspan::driver::hip::{HipDriver, HipOpenError};
use libloading::Library;

use crate::child::Child;
use crate::stand_in;

/// A folder with copies of the library under other names, gone at the end.
struct Copies(PathBuf);

impl Copies {
    fn new(test: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("growspan-hip-{test}-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        Self(folder)
    }

    fn add(&self, name: &str) -> PathBuf {
        let path = self.0.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::copy(stand_in::path(), &path).unwrap();
        path
    }
}

impl Drop for Copies {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn text(path: &Path) -> String {
    path.to_str().unwrap().to_owned()
}

pub(crate) fn as_child(role: &str) {
    let load = |variable: &str| {
        // SAFETY: the library is our own, and its initialisers do nothing.
        let library = unsafe { Library::new(std::env::var(variable).unwrap()) }.unwrap();
        core::mem::forget(library);
    };
    match role {
        "one" => load("FIRST"),
        "two" => {
            load("FIRST");
            load("SECOND");
        }
        "later" => {
            HipDriver::open(0).unwrap();
            load("SECOND");
        }
        _ => {}
    }
    match HipDriver::open(0) {
        Ok(driver) => println!("opened {driver:?}"),
        Err(error) => {
            println!("refused: {error}");
            let device = Device::hip(0).unwrap_err().to_string();
            assert!(device.contains(&error.to_string()), "{device}");
            assert_eq!(matches!(error, HipOpenError::TwoRuntimes { .. }), matches!(role, "one" | "two" | "later"));
        }
    }
}

#[test]
fn the_variable_names_the_library() {
    let copies = Copies::new("named");
    let path = text(&copies.add("my-own.so"));
    let child = || Child::of("7.14.1").set("GROWSPAN_HIP_LIBRARY", &path);
    assert!(child().role_well("loading open").contains(&format!("library: {path:?}")));
    // A copy that is loaded and another that is named make two.
    let loaded = text(&copies.add("libamdhip64.so.7"));
    let refused = child().set("FIRST", &loaded).role_well("loading one");
    assert!(refused.contains(&format!("two HIP runtimes, {loaded} and {path}")), "{refused}");
}

#[test]
fn a_copy_that_is_loaded_is_used_wherever_it_lies() {
    let copies = Copies::new("loaded");
    // The linker would find the first; the process has the second.
    let found = copies.add("path/libamdhip64.so.7");
    let loaded = text(&copies.add("torch libs/libamdhip64-0a1b.so.7"));
    let child = Child::of("7.14.1").left_to_search().set("LD_LIBRARY_PATH", text(found.parent().unwrap()));
    let seen = child.set("FIRST", &loaded).role_well("loading one");
    assert!(seen.contains(&format!("library: {loaded:?}")), "{seen}");
}

#[test]
fn two_runtimes_are_refused() {
    let copies = Copies::new("two");
    let [first, second] = ["a/libamdhip64.so.6", "b/libamdhip64.so.7"].map(|name| text(&copies.add(name)));
    let child = || Child::of("7.14.1").left_to_search().set("FIRST", &first).set("SECOND", &second);
    let refused = child().role_well("loading two");
    assert!(refused.contains("two HIP runtimes") && refused.contains(&first) && refused.contains(&second), "{refused}");
    // Also one that comes when ours is in use.
    let seen =
        Child::of("7.14.1").set("GROWSPAN_HIP_LIBRARY", &first).set("SECOND", &second).role_well("loading later");
    assert!(seen.contains("refused: this process would have two HIP runtimes"), "{seen}");
}

#[test]
fn the_usual_places_are_searched() {
    let copies = Copies::new("places");
    for (place, variable, value) in [
        ("linker/libamdhip64.so.7", "LD_LIBRARY_PATH", "linker"),
        ("older/libamdhip64.so.6", "LD_LIBRARY_PATH", "older"),
        ("plain/libamdhip64.so", "LD_LIBRARY_PATH", "plain"),
        ("rocm/lib/libamdhip64.so.6", "ROCM_PATH", "rocm"),
        ("venv/lib/python3.12/site-packages/_rocm_sdk_core/lib/libamdhip64.so.7", "VIRTUAL_ENV", "venv"),
    ] {
        let path = copies.add(place);
        let child = Child::of("7.14.1").left_to_search().set(variable, text(&copies.0.join(value)));
        let seen = child.role_well("loading open");
        let name = path.file_name().unwrap().to_str().unwrap();
        assert!(seen.contains(&format!("{name}\"")), "{place}: {seen}");
    }
}

#[test]
fn without_a_runtime_it_says_so() {
    if Path::new("/opt/rocm").exists() || Path::new("/usr/lib/x86_64-linux-gnu/libamdhip64.so.5").exists() {
        println!("this machine has a runtime");
        return;
    }
    let refused = Child::of("7.14.1").left_to_search().role_well("loading open");
    for part in ["refused: no HIP runtime: could not open libamdhip64.so.7 or ", "GROWSPAN_HIP_LIBRARY"] {
        assert!(refused.contains(part), "{refused}");
    }
    let refused = Child::of("7.14.1").set("GROWSPAN_HIP_LIBRARY", "libc.so.6").role_well("loading open");
    assert!(refused.contains("the HIP runtime is too old: libc.so.6 lacks hipInit, hipRuntimeGetVersion"), "{refused}");
}

#[test]
fn a_runtime_without_a_device_is_named() {
    for personality in ["none", "5.2"] {
        let refused = Child::of(personality).role_well("loading open");
        assert!(refused.contains("shows this process no device; check HIP_VISIBLE_DEVICES"), "{refused}");
        assert!(refused.contains("refused: HIP runtime "), "{refused}");
    }
}
