//! A stand-in for AMD's HIP runtime.
