//! Virtual memory management: reserve, create, map, give access, and the ways back.

use std::fs::File;
use std::time::{Duration, Instant};

use crate::abi::hipMemLocation;
use crate::abi::{HANDLE_POSIX_FD, LOCATION_DEVICE, TYPE_PINNED, code, hipMemAccessDesc, hipMemAllocationProp};
use crate::memory::{GRANULE, Memory, punch};
use crate::personality::Alignment;
use crate::runtime::{Call, planned_failure};
use crate::space;
use crate::table::{Handle, Mapping, Span};

/// What a real runtime's memory is a multiple of in its first check; it answers with another code than the second.
const FIRST_CHECK: usize = 2048;
/// How long a freed span's entry lives on where it goes late.
const LATE: Duration = Duration::from_millis(50);
/// How long a fresh mapping of a gfx12 card is blind.
const BLIND: Duration = Duration::from_micros(1500);

impl Call<'_> {
    fn vmm_or_not_supported(&self) -> Result<(), u32> {
        if self.config.rules.vmm { Ok(()) } else { Err(code::NOT_SUPPORTED) }
    }

    /// The code for sizes and alignments that do not fit, in the reservation of addresses.
    fn unfit(&self) -> u32 {
        if self.config.rules.seven { code::INVALID_VALUE } else { code::OUT_OF_MEMORY }
    }

    fn device_at(&self, location: hipMemLocation) -> Result<usize, u32> {
        if location.kind != LOCATION_DEVICE {
            return Err(code::INVALID_VALUE);
        }
        self.config.device(location.id).ok_or(code::INVALID_VALUE)
    }

    fn check_properties(&self, prop: hipMemAllocationProp) -> Result<usize, u32> {
        if prop.kind != TYPE_PINNED || prop.handle_type > HANDLE_POSIX_FD {
            return Err(code::INVALID_VALUE);
        }
        let device = self.device_at(prop.location)?;
        // Since 7.0 the place that was asked for is looked at and not used.
        Ok(if self.config.rules.seven { self.thread.device } else { device })
    }

    /// The handle, which the caller must still have a reference to.
    fn handle(&mut self, id: u64) -> &mut Handle {
        let name = self.name;
        match self.state.table.handles.get_mut(&id) {
            Some(handle) if handle.held > 0 => handle,
            _ => crate::misuse::misuse(name, format_args!("{id:#x} is no handle, or one that has been released")),
        }
    }

    pub(crate) fn granularity(&self, prop: hipMemAllocationProp, option: u32) -> Result<usize, u32> {
        self.vmm_or_not_supported()?;
        self.check_properties(prop)?;
        match option {
            0 => Ok(GRANULE as usize),
            1 => Ok(self.config.rules.recommended as usize),
            _ => Err(code::INVALID_VALUE),
        }
    }

    pub(crate) fn reserve(&mut self, size: usize, alignment: usize, hint: usize, flags: u64) -> Result<usize, u32> {
        if !self.config.rules.vmm {
            return Ok(0);
        }
        if size == 0 || flags != 0 {
            return Err(code::INVALID_VALUE);
        }
        // 6.1 wants a multiple of the granule, later ones a power of two.
        let fits = |alignment: usize| alignment.is_power_of_two() && alignment.is_multiple_of(GRANULE as usize);
        if !size.is_multiple_of(GRANULE as usize) || (alignment != 0 && !fits(alignment)) {
            return Err(self.unfit());
        }
        let alignment = match self.config.rules.alignment {
            Alignment::Ignored => 0,
            Alignment::Refused if alignment != 0 => return Err(code::INVALID_VALUE),
            Alignment::Refused | Alignment::Honoured => alignment,
        };
        let at = space::reserve(size, alignment, hint).ok_or(code::OUT_OF_MEMORY)?;
        let freed = &mut self.state.freed;
        freed.retain(|(_, when)| when.elapsed() < LATE);
        let erased = freed.iter().any(|(addr, _)| *addr == at);
        self.state.table.spans.insert(at, Span { size, device: self.thread.device, erased, stuck: false });
        Ok(at)
    }

    pub(crate) fn free_address(&mut self, addr: usize, size: usize) -> Result<(), u32> {
        self.vmm_or_not_supported()?;
        match self.state.table.spans.get(&addr) {
            None => self.misuse(format_args!("{addr:#x} is not the start of reserved addresses")),
            Some(span) if span.size != size => {
                self.misuse(format_args!("{size} bytes at {addr:#x}, where {} were reserved", span.size))
            }
            Some(span) if span.erased => self.misuse(format_args!(
                "the span at {addr:#x} was forgotten with the one that was there just before, which went late"
            )),
            Some(_) => {}
        }
        let stuck = self.state.table.spans.get(&addr).is_some_and(|span| span.stuck);
        if stuck || self.state.table.is_mapped_anywhere(addr, size) {
            return Err(code::UNKNOWN);
        }
        self.state.table.spans.remove(&addr);
        if let Some(code) = planned_failure(self.state, self.name) {
            return Err(code);
        }
        if self.config.rules.late_release {
            self.state.freed.push((addr, Instant::now()));
        }
        space::free(addr, size);
        self.state.memory.sweep();
        Ok(())
    }

    pub(crate) fn create(&mut self, size: usize, prop: hipMemAllocationProp, flags: u64) -> Result<u64, u32> {
        self.vmm_or_not_supported()?;
        let device = self.check_properties(prop)?;
        if flags != 0 || size == 0 || !size.is_multiple_of(FIRST_CHECK) {
            return Err(code::INVALID_VALUE);
        }
        let shareable = prop.handle_type == HANDLE_POSIX_FD;
        if shareable && !self.config.rules.sharing {
            return Err(code::NOT_SUPPORTED);
        }
        let size = size as u64;
        if !size.is_multiple_of(GRANULE) || size > self.config.rules.largest_create {
            return Err(code::OUT_OF_MEMORY);
        }
        let mut store = self.state.memory.take(self.config, device, size, shareable)?;
        if self.config.rules.file_per_handle
            && let Err(code) = self.state.memory.keep_file(&mut store)
        {
            self.state.memory.give_back(self.config, store, false);
            return Err(code);
        }
        let id = self.state.fresh_id();
        self.state.table.handles.insert(id, Handle { store, held: 1, leaked: 0, maps: 0 });
        Ok(id)
    }

    pub(crate) fn release(&mut self, id: u64) -> Result<(), u32> {
        self.vmm_or_not_supported()?;
        match self.state.table.handles.get_mut(&id) {
            Some(handle) if handle.held > 0 => handle.held -= 1,
            Some(handle) if handle.leaked > 0 => handle.leaked -= 1,
            _ => self.misuse(format_args!("{id:#x} is no handle, or one that has been released")),
        }
        self.stick_where_mapped(id);
        self.end_if_unreferenced(id);
        Ok(())
    }

    /// On 6.x addresses cannot be freed after a handle was released while it was mapped there.
    fn stick_where_mapped(&mut self, id: u64) {
        let table = &mut self.state.table;
        if self.config.rules.seven {
            return;
        }
        for at in table.mappings.iter().filter(|(_, mapping)| mapping.handle == id).map(|(at, _)| *at) {
            if let Some((_, span)) = table.spans.range_mut(..=at).next_back() {
                span.stuck = true;
            }
        }
    }

    fn end_if_unreferenced(&mut self, id: u64) {
        let unreferenced = |handle: &Handle| handle.held + handle.leaked + handle.maps == 0;
        if self.state.table.handles.get(&id).is_some_and(unreferenced)
            && let Some(handle) = self.state.table.handles.remove(&id)
        {
            self.state.memory.give_back(self.config, handle.store, true);
        }
    }

    pub(crate) fn map(&mut self, addr: usize, size: usize, offset: usize, id: u64, flags: u64) -> Result<(), u32> {
        self.vmm_or_not_supported()?;
        let handle = self.handle(id);
        if offset != 0 || flags != 0 || size as u64 != handle.store.size || !addr.is_multiple_of(GRANULE as usize) {
            return Err(code::INVALID_VALUE);
        }
        let end = addr.checked_add(size).ok_or(code::INVALID_VALUE)?;
        let (start, span) = self.state.table.span_of(addr).ok_or(code::INVALID_VALUE)?;
        if end > start + span.size {
            return Err(code::INVALID_VALUE);
        }
        let taken = self.state.table.is_mapped_anywhere(addr, size);
        let failed = taken
            || self.state.map_is_to_fail()
            || !self.state.memory.may_open_a_file()
            || !self.show_if_it_takes_an_entry(addr, size, id);
        if failed && self.config.rules.silent_map {
            self.handle(id).leaked += 1;
            return Ok(());
        }
        if failed {
            return Err(if taken { code::INVALID_VALUE } else { code::MAP_FAILED });
        }
        self.handle(id).maps += 1;
        let access = vec![0; self.config.devices];
        let mapping = Mapping { size, handle: id, access, corrupt: false, blind_until: None };
        self.state.table.mappings.insert(addr, mapping);
        Ok(())
    }

    /// On the versions that map the memory into the process as well, does so.
    fn show_if_it_takes_an_entry(&self, addr: usize, size: usize, id: u64) -> bool {
        if !self.config.rules.seven {
            return true;
        }
        let Some(handle) = self.state.table.handles.get(&id) else { return false };
        space::show(addr, size, self.state.memory.file(&handle.store), handle.store.offset)
    }

    pub(crate) fn unmap(&mut self, addr: usize, size: usize) -> Result<(), u32> {
        self.vmm_or_not_supported()?;
        let starts = self.mappings_to_unmap(addr, size)?;
        if let Some(by) = self.state.streams.touching(addr, size) {
            self.misuse(format_args!(
                "{by} is queued and not done yet, and it uses memory in {size} bytes at {addr:#x}"
            ));
        }
        for start in starts {
            if let Some(mapping) = self.state.table.mappings.remove(&start) {
                if let Some(handle) = self.state.table.handles.get_mut(&mapping.handle) {
                    handle.maps -= 1;
                }
                if self.config.rules.seven && !self.config.rules.memory_stays_while_address_maps_it {
                    space::hide(start, mapping.size);
                }
                self.end_if_unreferenced(mapping.handle);
            }
        }
        Ok(())
    }

    fn mappings_to_unmap(&self, addr: usize, size: usize) -> Result<Vec<usize>, u32> {
        let table = &self.state.table;
        if self.config.rules.seven {
            return table.run(addr, size).ok_or(code::INVALID_VALUE);
        }
        match table.mappings.get(&addr) {
            None => self.misuse(format_args!("nothing is mapped at {addr:#x}, and this version crashes")),
            Some(mapping) if mapping.size != size => self.misuse(format_args!(
                "{size} bytes at {addr:#x}, where {} are mapped, and this version does nothing and says success",
                mapping.size
            )),
            Some(_) => Ok(vec![addr]),
        }
    }

    pub(crate) fn set_access(&mut self, addr: usize, size: usize, descs: &[hipMemAccessDesc]) -> Result<(), u32> {
        self.vmm_or_not_supported()?;
        let mut grants = Vec::new();
        for desc in descs {
            if !matches!(desc.flags, 0 | 1 | 3) {
                return Err(code::INVALID_VALUE);
            }
            grants.push((self.device_at(desc.location)?, desc.flags));
        }
        let rules = &self.config.rules;
        let state = &mut *self.state;
        let starts = state.table.run(addr, size).ok_or(code::INVALID_VALUE)?;
        if grants.is_empty() || (rules.access_by_prefix && !state.table.has_prefix(addr, size)) {
            return Err(code::INVALID_VALUE);
        }
        if !state.memory.may_open_a_file() {
            return Err(code::INVALID_VALUE);
        }
        let origin = |start: &usize| {
            let mapping = state.table.mappings.get(start)?;
            state.table.handles.get(&mapping.handle)?.store.imported
        };
        if rules.import_needs_its_file && starts.iter().filter_map(origin).any(|origin| !origin.is_open()) {
            return Err(code::INVALID_VALUE);
        }
        for (device, flags) in grants {
            for start in &starts {
                let Some(mapping) = state.table.mappings.get_mut(start) else { continue };
                let Some(handle) = state.table.handles.get(&mapping.handle) else { continue };
                let owner = handle.store.device;
                if rules.late_peer_corrupts && device != owner && flags != 0 && mapping.access[owner] != 0 {
                    mapping.corrupt = true;
                    punch(state.memory.file(&handle.store), handle.store.offset, handle.store.size);
                }
                mapping.access[device] = flags;
                if self.config.mappings_start_blind() {
                    mapping.blind_until = Some(Instant::now() + BLIND);
                }
            }
        }
        Ok(())
    }

    pub(crate) fn get_access(&self, addr: usize, location: hipMemLocation) -> Result<u64, u32> {
        self.vmm_or_not_supported()?;
        let device = self.device_at(location)?;
        let (_, mapping) = self.state.table.mapping_of(addr).ok_or(code::INVALID_VALUE)?;
        Ok(u64::from(mapping.access[device]))
    }

    pub(crate) fn retain(&mut self, addr: usize) -> Result<u64, u32> {
        self.vmm_or_not_supported()?;
        let (_, mapping) = self.state.table.mapping_of(addr).ok_or(code::INVALID_VALUE)?;
        let id = mapping.handle;
        if self.config.rules.seven
            && let Some(handle) = self.state.table.handles.get_mut(&id)
        {
            handle.held += 1;
        }
        Ok(id)
    }

    fn check_sharing(&self, kind: u32) -> Result<(), u32> {
        self.vmm_or_not_supported()?;
        if !self.config.rules.sharing {
            return Err(code::NOT_SUPPORTED);
        }
        if kind == HANDLE_POSIX_FD { Ok(()) } else { Err(code::INVALID_VALUE) }
    }

    pub(crate) fn export(&mut self, id: u64, kind: u32, flags: u64) -> Result<File, u32> {
        self.check_sharing(kind)?;
        let handle = self.handle(id);
        if flags != 0 {
            return Err(code::INVALID_VALUE);
        }
        handle.store.share()
    }

    pub(crate) fn import(&mut self, fd: i32, kind: u32) -> Result<u64, u32> {
        self.check_sharing(kind)?;
        let store = Memory::import(self.thread.device, fd)?;
        let id = self.state.fresh_id();
        self.state.table.handles.insert(id, Handle { store, held: 1, leaked: 0, maps: 0 });
        Ok(id)
    }
}
