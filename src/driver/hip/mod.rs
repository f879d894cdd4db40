//! AMD cards, through the HIP runtime.

#[doc(hidden)]
#[allow(non_camel_case_types, non_upper_case_globals, reason = "named as the header names them")]
pub mod ffi;
