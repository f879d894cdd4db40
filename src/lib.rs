#![doc = include_str!("../README.md")]

pub mod bytes;
pub mod driver;
pub mod sys;

pub use bytes::Bytes;
