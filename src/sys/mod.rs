//! Linux calls behind safe functions. Nothing here knows of devices.
pub mod limits;
