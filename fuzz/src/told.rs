//! What hooks were told, which must be what is mapped.

use std::collections::BTreeMap;
use std::sync::Mutex;

use growspan::{MapHooks, MappedChunk};

/// Chunks that hooks were told of, by address, and what was wrong with that: a hook that panics is only logged.
#[derive(Default)]
pub(crate) struct Told(Mutex<(BTreeMap<u64, u64>, Vec<String>)>);

impl Told {
    /// How much is mapped, as far as hooks know.
    pub(crate) fn mapped(&self) -> u64 {
        let told = self.0.lock().unwrap();
        assert_eq!(told.1, Vec::<String>::new(), "told of chunks");
        told.0.values().sum()
    }
}

impl MapHooks for Told {
    fn mapped(&self, chunk: MappedChunk) {
        let mut told = self.0.lock().unwrap();
        if told.0.insert(chunk.address, chunk.bytes.get()).is_some() {
            told.1.push(format!("mapped and was already: {chunk:?}"));
        }
    }

    fn unmapping(&self, chunk: MappedChunk) {
        let mut told = self.0.lock().unwrap();
        if told.0.remove(&chunk.address) != Some(chunk.bytes.get()) {
            told.1.push(format!("unmapped and was not there: {chunk:?}"));
        }
    }
}
