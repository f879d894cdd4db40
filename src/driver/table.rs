//! Driver libraries, opened at run time: a table of typed function pointers, or the names of all that is missing.
//!
//! Nothing here panics, and a library that was opened is never closed: other parts of the process (a framework, an
//! engine) use the same driver, and unloading one that started threads is how processes die at exit.

use core::error::Error;
use core::ffi::c_void;
use core::fmt;
use core::ptr::NonNull;
use std::ffi::{OsStr, OsString};

use libloading::Library;

/// Why a driver library could not be used.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LoadError {
    /// No library of that name could be opened.
    LibraryMissing {
        /// The names that were tried, in this order.
        tried: Vec<String>,
        /// What the dynamic linker said to each.
        why: String,
    },
    /// The library was opened and lacks functions: it is older than what is needed, or not the driver.
    SymbolsMissing {
        /// The library's name.
        library: String,
        /// Every function that is missing.
        names: Vec<&'static str>,
    },
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::LibraryMissing { tried, why } => write!(f, "could not open {} ({why})", tried.join(" or ")),
            Self::SymbolsMissing { library, names } => write!(f, "{library} lacks {}", names.join(", ")),
        }
    }
}

impl Error for LoadError {}

/// A library that stays open until the process ends.
#[derive(Clone, Debug)]
pub(crate) struct SharedLibrary {
    library: &'static Library,
    name: String,
}

impl SharedLibrary {
    /// Opens the first of `names` that can be opened.
    ///
    /// # Safety
    /// Opening a library runs its initialisers: `names` must be those of driver libraries.
    pub(crate) unsafe fn open(names: &[OsString]) -> Result<Self, LoadError> {
        let mut why = Vec::new();
        for name in names {
            // SAFETY: the caller vouches for the libraries of these names, which is all that opening asks for.
            match unsafe { Library::new(name.as_os_str()) } {
                Ok(library) => return Ok(Self { library: Box::leak(Box::new(library)), name: lossy(name) }),
                Err(error) => why.push(innermost(&error)),
            }
        }
        Err(LoadError::LibraryMissing { tried: names.iter().map(|name| lossy(name)).collect(), why: why.join("; ") })
    }

    /// The name it was opened by.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// The function called `name`, if the library has it.
    ///
    /// # Safety
    /// `F` is an `unsafe extern "C" fn` pointer type with the function's own signature.
    pub(crate) unsafe fn function<F: Copy>(&self, name: &str) -> Option<F> {
        const { assert!(size_of::<Option<F>>() == size_of::<*mut c_void>(), "a function pointer") };
        // SAFETY: an `Option` of a function pointer has the representation of the address, null being `None`, and the
        // caller vouches that `F` is the type of the function at that address.
        unsafe { self.library.get::<Option<F>>(name) }.ok().and_then(|symbol| *symbol)
    }

    /// The address of the symbol called `name`, if the library has it.
    pub(crate) fn address(&self, name: &str) -> Option<NonNull<c_void>> {
        // SAFETY: an `Option<NonNull>` can hold any address; what lies there is not touched.
        unsafe { self.library.get::<Option<NonNull<c_void>>>(name) }.ok().and_then(|symbol| *symbol)
    }
}

fn lossy(name: &OsStr) -> String {
    name.to_string_lossy().into_owned()
}

/// The loader's error says "dlopen failed" only; what the dynamic linker said is its source.
fn innermost(error: &libloading::Error) -> String {
    let mut error: &dyn Error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string()
}

/// Declares a table of functions of a [`SharedLibrary`], with `resolve(&SharedLibrary) -> Result<Self, LoadError>`.
/// Functions under `optional` become `Option`s; of the others every missing one is named.
///
/// ```text
/// symbol_table! {
///     /// What we call.
///     pub(super) struct Table {
///         fn cuInit(flags: u32) -> u32;
///     }
///     optional {
///         fn cuCtxGetId(context: CUcontext, id: *mut u64) -> u32;
///     }
/// }
/// ```
macro_rules! symbol_table {
    (
        $(#[$meta:meta])*
        $vis:vis struct $table:ident {
            $( fn $name:ident($($arg:ident: $ty:ty),*) -> $ret:ty; )*
        }
        $( optional {
            $( fn $maybe:ident($($maybe_arg:ident: $maybe_ty:ty),*) -> $maybe_ret:ty; )*
        } )?
    ) => {
        $(#[$meta])*
        #[allow(non_snake_case, reason = "the fields are named as the functions are")]
        $vis struct $table {
            $( $vis $name: unsafe extern "C" fn($($arg: $ty),*) -> $ret, )*
            $( $( $vis $maybe: Option<unsafe extern "C" fn($($maybe_arg: $maybe_ty),*) -> $maybe_ret>, )* )?
        }

        #[allow(non_snake_case, reason = "the variables are named as the functions are")]
        impl $table {
            $vis fn resolve(
                library: &$crate::driver::table::SharedLibrary,
            ) -> Result<Self, $crate::driver::table::LoadError> {
                $(
                    // SAFETY: the signature is the one that the driver's header declares.
                    let $name = unsafe {
                        library.function::<unsafe extern "C" fn($($arg: $ty),*) -> $ret>(stringify!($name))
                    };
                )*
                $( $(
                    // SAFETY: as above.
                    let $maybe = unsafe {
                        library.function::<unsafe extern "C" fn($($maybe_arg: $maybe_ty),*) -> $maybe_ret>(
                            stringify!($maybe),
                        )
                    };
                )* )?
                if let ($( Some($name), )*) = ($( $name, )*) {
                    return Ok(Self { $( $name, )* $( $( $maybe, )* )? });
                }
                let mut names = Vec::new();
                $( if $name.is_none() { names.push(stringify!($name)); } )*
                Err($crate::driver::table::LoadError::SymbolsMissing { library: library.name().to_owned(), names })
            }
        }
    };
}
pub(crate) use symbol_table;

#[cfg(test)]
mod tests {
    use super::{LoadError, SharedLibrary};

    symbol_table! {
        #[derive(Debug)]
        #[allow(dead_code, reason = "it cannot be resolved, so nothing is ever read")]
        struct C {
            fn getpid() -> i32;
            fn no_such_function() -> i32;
            fn nor_this_one(a: u32) -> u32;
        }
    }

    symbol_table! {
        struct Lenient {
            fn getuid() -> u32;
        }
        optional {
            fn getpid() -> i32;
            fn no_such_function() -> i32;
        }
    }

    fn libc() -> SharedLibrary {
        // SAFETY: the C library is open already.
        unsafe { SharedLibrary::open(&["libnone.so.1".into(), "libc.so.6".into()]) }.unwrap()
    }

    #[test]
    fn every_missing_function_is_named() {
        let error = C::resolve(&libc()).unwrap_err();
        assert_eq!(error.to_string(), "libc.so.6 lacks no_such_function, nor_this_one");
    }

    #[test]
    fn optional_functions_may_be_missing() {
        let table = Lenient::resolve(&libc()).unwrap();
        let (getpid, getuid) = (table.getpid.unwrap(), table.getuid);
        // SAFETY: this function takes nothing and has no preconditions.
        assert_eq!(unsafe { getpid() }.cast_unsigned(), std::process::id());
        // SAFETY: neither has this one.
        assert_eq!(unsafe { getuid() }, unsafe { libc::getuid() });
        assert!(table.no_such_function.is_none());
        assert!(libc().address("getpid").is_some());
        assert!(libc().address("no_such_function").is_none());
    }

    #[test]
    fn a_missing_library_says_what_was_tried_and_what_the_linker_said() {
        // SAFETY: there is nothing of these names to run.
        let error = unsafe { SharedLibrary::open(&["libnone.so.1".into(), "libnone.so".into()]) }.unwrap_err();
        let LoadError::LibraryMissing { tried, why } = &error else { panic!("{error}") };
        assert_eq!(tried, &["libnone.so.1", "libnone.so"]);
        assert!(why.contains("libnone.so.1: cannot open shared object file"), "{why}");
        assert!(error.to_string().starts_with("could not open libnone.so.1 or libnone.so (libnone.so.1: "), "{error}");
    }
}
