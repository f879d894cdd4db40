//! What the devices say about themselves.

use crate::abi::{PROPERTIES_SIZE, code};
use crate::runtime::Call;

const NAME_AT: usize = 0;
const UUID_AT: usize = 256;
const TOTAL_AT: usize = 288;
const INTEGRATED_AT: usize = 396;
const BUS_AT: usize = 584;
const ARCH_AT: usize = 1160;

impl Call<'_> {
    pub(crate) fn known_device(&self, ordinal: i32) -> Result<usize, u32> {
        self.config.device(ordinal).ok_or(code::INVALID_DEVICE)
    }

    fn bus(&self, device: usize) -> u32 {
        self.config.bus + device as u32
    }

    pub(crate) fn device_name(&self, device: usize) -> String {
        format!("AMD stand-in {} ({})", device, self.config.gfx)
    }

    pub(crate) fn pci_bus_id(&self, device: usize) -> String {
        format!("0000:{:02x}:00.0", self.bus(device))
    }

    /// Sixteen characters, not the same on two devices or two buses.
    pub(crate) fn uuid(&self, device: usize) -> [u8; 16] {
        let mut uuid = *b"fa4e000000000000";
        for (place, byte) in uuid.iter_mut().skip(8).zip(format!("{:08x}", self.bus(device)).bytes()) {
            *place = byte;
        }
        uuid
    }

    pub(crate) fn attribute(&self, attribute: u32, device: usize) -> Result<i32, u32> {
        Ok(match attribute {
            // How many copies run at once.
            2 => 2,
            // The host's memory can be mapped.
            3 => 1,
            // Integrated.
            16 => i32::from(self.config.integrated),
            // Memory that both sides use at once; pageable memory within reach.
            9 | 65 => 0,
            // What it computes, by the name of the chip: gfx942 is 9.4, gfx1201 is 12.0.
            23 | 61 => {
                let digits: String = self.config.gfx.chars().skip(3).take_while(char::is_ascii_hexdigit).collect();
                let major = digits.len().saturating_sub(2);
                let digits = if attribute == 23 { digits.get(..major) } else { digits.get(major..=major) };
                return digits.and_then(|digits| digits.parse().ok()).ok_or(code::INVALID_VALUE);
            }
            // Managed memory.
            24 => 1,
            // Multiprocessors.
            63 => 304,
            67 => self.bus(device).cast_signed(),
            // PCI device and domain.
            68 | 69 => 0,
            // One address space with the host.
            85 => 1,
            // Threads of a wavefront.
            87 => {
                if self.config.gfx.starts_with("gfx9") {
                    64
                } else {
                    32
                }
            }
            // Memory pools.
            88 => 1,
            89 => i32::from(self.config.rules.vmm),
            _ => return Err(code::INVALID_VALUE),
        })
    }

    pub(crate) fn properties(&self, device: usize) -> Result<[u8; PROPERTIES_SIZE], u32> {
        // The function came with 6.0; its symbol cannot be missing here.
        if self.config.rules.version < 60_000_000 {
            return Err(code::NOT_SUPPORTED);
        }
        let mut all = [0; PROPERTIES_SIZE];
        let mut put = |at: usize, bytes: &[u8]| {
            for (place, byte) in all.iter_mut().skip(at).zip(bytes) {
                *place = *byte;
            }
        };
        put(NAME_AT, self.device_name(device).as_bytes().get(..255).unwrap_or(self.device_name(device).as_bytes()));
        put(UUID_AT, &self.uuid(device));
        put(TOTAL_AT, &self.config.memory.to_ne_bytes());
        put(INTEGRATED_AT, &0_i32.to_ne_bytes());
        put(BUS_AT, &self.bus(device).to_ne_bytes());
        put(ARCH_AT, self.config.gfx.as_bytes().get(..255).unwrap_or(self.config.gfx.as_bytes()));
        Ok(all)
    }
}
