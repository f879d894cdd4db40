//! Rules, tried on instances.
