//! The devices that need no GPU: host memory, and the simulated driver in its personalities.

use std::sync::Arc;

use growspan::driver::host::{HostDriver, HostOptions};
use growspan::driver::sim::{Personality, SimDriver, SimOptions};
use growspan::{AheadPolicy, Bytes, Device, DeviceOptions, Mode, Sizing};

use crate::GRANULE;
use crate::world::{World, units};

/// A simulated card with small chunks.
pub(crate) fn card() -> SimOptions {
    SimDriver::builder()
        .total(Bytes::gib(1))
        .granularity(Bytes::new(GRANULE as u64))
        .info(|info| info.wants_2_mib = false)
}

/// What buffers keep ahead in those worlds where they do: two of the small chunks or one of the larger.
pub(crate) const AHEAD: AheadPolicy = AheadPolicy::Bytes(Bytes::new(2 * GRANULE as u64));

impl World {
    pub(crate) fn host(options: DeviceOptions) -> Self {
        Self::host_ahead(options, AheadPolicy::Off)
    }

    pub(crate) fn host_ahead(options: DeviceOptions, ahead: AheadPolicy) -> Self {
        let memory = HostOptions::default().with_capacity(Bytes::mib(512)).with_granularity(Bytes::new(GRANULE as u64));
        let host = HostDriver::open(memory).unwrap();
        Self::ahead_over("host", Arc::new(host), None, options, ahead)
    }

    pub(crate) fn sim(options: SimOptions, device: DeviceOptions) -> Self {
        Self::sim_ahead(options, device, AheadPolicy::Off)
    }

    pub(crate) fn sim_ahead(options: SimOptions, device: DeviceOptions, ahead: AheadPolicy) -> Self {
        let sim = options.build();
        Self::ahead_over("sim", sim.driver(), Some(sim), device, ahead)
    }

    pub(crate) fn personality(personality: Personality, device: DeviceOptions) -> Self {
        let sim = SimDriver::builder().total(Bytes::gib(8)).personality(personality).build();
        if let Personality::FreeOverReported(bytes) = personality {
            // What is left out of the figure is what other programs hold.
            sim.set_used_by_others(Bytes::new(bytes));
        }
        Self::over(&format!("{personality:?}"), sim.driver(), Some(sim), device)
    }
}

/// The devices the promises are tested on: host and sim, each way of sizing, with and without virtual memory, and
/// those personalities of which the crate makes the best.
pub(crate) fn worlds() -> Vec<World> {
    let options = DeviceOptions::new;
    let bound = |personality| World::sim(card().personality(personality), options());
    let two_phases = card().info(|info| info.quirks.map_beside_kernels = false);
    vec![
        World::host(options()),
        World::host_ahead(options(), AHEAD),
        World::sim_ahead(card(), options(), AHEAD),
        World::sim_ahead(card(), options().pool_keep(Bytes::ZERO).sizing(Sizing::Exact), AHEAD),
        World::sim_ahead(two_phases, options(), AHEAD),
        World::host(options().contiguous(true)),
        World::host(options().pool_keep(Bytes::ZERO)),
        World::sim(card(), options()),
        World::sim(card(), options().sizing(Sizing::Uniform(units(4)))),
        World::sim(card(), options().sizing(Sizing::Exact)),
        World::sim(card(), options().pool_keep(Bytes::ZERO)),
        World::sim(card(), options().contiguous(true)),
        bound(Personality::OpenFilePerChunk { held: 16, soft: 256, hard: 4096, as_out_of_memory: true }),
        bound(Personality::MapCountLimit { held: 100, limit: 2000 }),
        bound(Personality::UniformChunksOnly),
    ]
}

/// Devices with room for a thousand chunks of 2 MiB.
pub(crate) fn large_worlds() -> Vec<World> {
    let host = HostDriver::open(HostOptions::default().with_capacity(Bytes::gib(3))).unwrap();
    vec![
        World::sim(SimDriver::builder().total(Bytes::gib(8)), DeviceOptions::new()),
        World::over("host", Arc::new(host), None, DeviceOptions::new()),
    ]
}

/// A device whose chunks other processes can have.
pub(crate) fn sharing_device() -> Device {
    let memory = HostOptions::default().with_capacity(Bytes::mib(512)).with_granularity(Bytes::new(GRANULE as u64));
    DeviceOptions::new().host(memory).unwrap()
}

/// Reads what is mapped at an address of that device.
pub(crate) fn peek(address: u64, bytes: &mut [u8]) {
    let from = core::ptr::with_exposed_provenance::<u8>(address as usize);
    // SAFETY: the callers ask for mapped host memory, which nobody writes meanwhile.
    unsafe { from.copy_to_nonoverlapping(bytes.as_mut_ptr(), bytes.len()) };
}

/// Every personality with a device's worth of memory, the mode it leads to, and what its reason says.
pub(crate) fn personalities() -> Vec<(Personality, Mode, &'static str)> {
    use Mode::{Contiguous, Virtual};
    let files = |soft, hard| Personality::OpenFilePerChunk { held: 16, soft, hard, as_out_of_memory: true };
    vec![
        (Personality::Granularity4K, Contiguous, "the recommended allocation granularity is 4 KiB, not 2 MiB or more"),
        (
            Personality::ReleaseKeepsMemory,
            Contiguous,
            "the free VRAM fell by 32 MiB for 32 MiB mapped and rose by 0 MiB after its release",
        ),
        (files(256, 4096), Virtual, ""),
        (
            files(100, 130),
            Contiguous,
            "keeps an open file per 2 MiB chunk: 1104 needed, and the open-file limit is 130 (hard 130;",
        ),
        (Personality::MapCountLimit { held: 100, limit: 2000 }, Virtual, ""),
        (Personality::UniformChunksOnly, Virtual, ""),
        (Personality::HangsInMap, Contiguous, "mapping: the driver did not return within 0.1 s"),
        (Personality::HangsInSetAccess, Contiguous, "setting access: the driver did not return within 0.1 s"),
        (Personality::StaleAfterMap, Contiguous, "mapping again: 0xb1 was written at offset 0 and 0xa1 was read back"),
        (
            Personality::MapsNothing { access_fails: false },
            Contiguous,
            "reading back: 0xa1 was written at offset 0 and 0x00 was read back",
        ),
        (
            Personality::MapsNothing { access_fails: true },
            Contiguous,
            "setting access: set access failed: invalid value",
        ),
        (
            Personality::ReserveReturnsNull,
            Contiguous,
            "reserving addresses: the driver returned success and a null address",
        ),
        (Personality::VgpuNotSupported, Contiguous, "creating chunks: create failed: not supported"),
        (Personality::NoSupport, Contiguous, "the driver has no virtual memory: support failed: not found"),
        (Personality::ReserveLimit(1 << 30), Virtual, ""),
        (Personality::FreeOverReported(1 << 30), Virtual, ""),
    ]
}
