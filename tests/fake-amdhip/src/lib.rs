//! A stand-in for AMD's HIP runtime.

mod abi;
mod blocks;
mod capture;
mod control;
mod copies;
mod devices;
mod exports;
mod memory;
mod misuse;
mod personality;
mod pointers;
mod runtime;
mod space;
mod streams;
mod table;
#[cfg(test)]
mod tests;
mod vmm;

pub use abi::*;
pub use control::*;
pub use exports::*;
pub use pointers::{In, Out};
