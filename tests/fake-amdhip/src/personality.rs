//! What each version of the runtime does differently, as one table of rules, and the rest of what the environment says.

use crate::abi::code;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// What `hipMemAddressReserve` makes of its alignment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Alignment {
    /// Looked at, then forgotten.
    Ignored,
    /// Anything but zero is an error.
    Refused,
    /// The address is aligned so.
    Honoured,
}

/// The behaviour of one version. The documentation of the crate has it as a table.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rules {
    pub(crate) name: &'static str,
    pub(crate) version: i32,
    /// What every call that needs a device returns, if it is not for the call to say.
    pub(crate) dead: Option<u32>,
    /// Virtual memory management at all.
    pub(crate) vmm: bool,
    /// 7.0 or newer: other error codes, unmap refuses instead of crashing, memory comes from the current device,
    /// `hipMemRetainAllocationHandle` adds a reference.
    pub(crate) seven: bool,
    pub(crate) recommended: u64,
    pub(crate) largest_create: u64,
    pub(crate) sharing: bool,
    pub(crate) alignment: Alignment,
    /// A freed span's entry goes late, and takes that of a new span at the same address along.
    pub(crate) late_release: bool,
    pub(crate) access_by_prefix: bool,
    pub(crate) silent_map: bool,
    pub(crate) memory_never_returns: bool,
    pub(crate) memory_stays_while_address_maps_it: bool,
    pub(crate) copy_within_one_mapping: bool,
    pub(crate) file_per_handle: bool,
    pub(crate) import_needs_its_file: bool,
    pub(crate) late_peer_corrupts: bool,
    pub(crate) set_access_hangs: bool,
    /// The device that the version comes with, if the environment names none.
    pub(crate) gfx: &'static str,
}

const V6_4_3: Rules = Rules {
    name: "6.4.3",
    version: 60_443_484,
    dead: None,
    vmm: true,
    seven: false,
    recommended: 4 * KIB,
    largest_create: 256 * MIB,
    sharing: true,
    alignment: Alignment::Ignored,
    late_release: true,
    access_by_prefix: false,
    silent_map: true,
    memory_never_returns: false,
    memory_stays_while_address_maps_it: false,
    copy_within_one_mapping: false,
    file_per_handle: false,
    import_needs_its_file: false,
    late_peer_corrupts: false,
    set_access_hangs: false,
    gfx: "gfx942:sramecc+:xnack-",
};

const V6_4_0: Rules = Rules { name: "6.4.0", version: 60_443_482, memory_never_returns: true, ..V6_4_3 };

const V6_1: Rules = Rules { name: "6.1", version: 60_140_093, sharing: false, copy_within_one_mapping: true, ..V6_4_3 };

const V5_7: Rules = Rules { name: "5.7", version: 50_731_921, vmm: false, sharing: false, ..V6_4_3 };

const V5_2: Rules = Rules { name: "5.2", version: 50_221_153, dead: Some(code::INVALID_DEVICE), ..V5_7 };

const V7_2_4: Rules = Rules {
    name: "7.2.4",
    version: 70_253_211,
    seven: true,
    late_release: false,
    largest_create: u64::MAX,
    alignment: Alignment::Refused,
    access_by_prefix: true,
    memory_stays_while_address_maps_it: true,
    ..V6_4_3
};

const V7_10: Rules = Rules { name: "7.10", version: 70_253_210, ..V7_2_4 };

const V7_12: Rules = Rules { name: "7.12", version: 71_260_610, recommended: 2 * MIB, ..V7_2_4 };

const V7_13: Rules = Rules { name: "7.13", version: 71_399_004, memory_stays_while_address_maps_it: false, ..V7_12 };

const V7_14_1: Rules = Rules {
    name: "7.14.1",
    version: 71_460_850,
    recommended: 2 * MIB,
    alignment: Alignment::Honoured,
    access_by_prefix: false,
    silent_map: false,
    memory_stays_while_address_maps_it: false,
    file_per_handle: true,
    import_needs_its_file: true,
    late_peer_corrupts: true,
    ..V7_2_4
};

const V10_0: Rules =
    Rules { name: "10.0", version: 71_560_900, file_per_handle: false, late_peer_corrupts: false, ..V7_14_1 };

const GFX1201: Rules = Rules { name: "gfx1201", gfx: "gfx1201", ..V7_14_1 };

const OLD_DRM: Rules = Rules { name: "old-drm", set_access_hangs: true, ..V7_14_1 };

const NONE: Rules = Rules { name: "none", dead: Some(code::NO_DEVICE), ..V7_14_1 };

const ALL: [Rules; 14] =
    [V5_2, V5_7, V6_1, V6_4_0, V6_4_3, V7_2_4, V7_10, V7_12, V7_13, V7_14_1, V10_0, GFX1201, OLD_DRM, NONE];

/// Everything that is fixed for the life of a runtime.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    pub(crate) rules: Rules,
    pub(crate) devices: usize,
    /// Bytes of each device.
    pub(crate) memory: u64,
    /// Bytes of each device that are in use and that `hipMemGetInfo` does not know of.
    pub(crate) graphics: u64,
    pub(crate) gfx: String,
    /// Whether the devices share the host's memory.
    pub(crate) integrated: bool,
    /// PCI bus of device 0.
    pub(crate) bus: u32,
    /// How often page-locking memory that is not there is begun again.
    pub(crate) disturbed: u64,
    /// How far from the host's address devices see page-locked memory.
    pub(crate) pin_offset: u64,
    /// A function, and which call of it never returns.
    pub(crate) hang: Option<(String, u64)>,
    /// Functions that give other numbers than the truth.
    says: Vec<(String, Vec<i64>)>,
}

impl Config {
    /// Reads the variables through `var`.
    ///
    /// # Errors
    /// A message that names the variable, what it held and what it may hold.
    pub(crate) fn read(var: impl Fn(&str) -> Option<String>) -> Result<Self, String> {
        let name = var("FAKE_AMDHIP").unwrap_or_else(|| V7_14_1.name.to_owned());
        let Some(mut rules) = ALL.into_iter().find(|rules| rules.name == name) else {
            let known = ALL.map(|rules| rules.name).join(", ");
            return Err(format!("FAKE_AMDHIP is {name:?}, which is none of: {known}"));
        };
        let number = |name: &str, otherwise: u64| match var(name) {
            None => Ok(otherwise),
            Some(text) => {
                let parsed = match text.strip_prefix("0x") {
                    Some(hex) => u64::from_str_radix(hex, 16),
                    None => text.parse(),
                };
                parsed.map_err(|_| format!("{name} is {text:?}, which is not a number"))
            }
        };
        let mib = |name: &str, otherwise: u64| {
            number(name, otherwise)?.checked_mul(MIB).ok_or_else(|| format!("{name} is more than there are bytes"))
        };
        let devices = number("FAKE_AMDHIP_DEVICES", 1)?;
        let Ok(devices @ 0..=64) = usize::try_from(devices) else {
            return Err(format!("FAKE_AMDHIP_DEVICES is {devices}, and at most 64 are possible"));
        };
        let bus = number("FAKE_AMDHIP_PCI", 3)?;
        let Ok(bus @ 0..=0xc0) = u32::try_from(bus) else {
            return Err(format!("FAKE_AMDHIP_PCI is {bus}, and the first bus can be 192 at most"));
        };
        // What a real runtime reads itself.
        rules.vmm &= var("HIP_VMEM_MANAGE_SUPPORT").is_none_or(|text| text != "0");
        let hang = var("FAKE_AMDHIP_HANG").map(|text| {
            let (function, nth) = text.split_once(':').unwrap_or((&text, "1"));
            let nth = nth.parse().map_err(|_| format!("FAKE_AMDHIP_HANG is {text:?}, and {nth:?} is not a number"))?;
            Ok::<_, String>((function.to_owned(), nth))
        });
        let says = var("FAKE_AMDHIP_SAYS").unwrap_or_default();
        let says = says.split(';').filter(|lie| !lie.is_empty()).map(|lie| {
            let (function, numbers) = lie.split_once('=').unwrap_or((lie, ""));
            let numbers = numbers.split(',').map(|number| number.parse::<i64>());
            let numbers = numbers.collect::<Result<_, _>>().map_err(|_| format!("FAKE_AMDHIP_SAYS has {lie:?}"))?;
            Ok::<_, String>((function.to_owned(), numbers))
        });
        let says = says.collect::<Result<_, _>>()?;
        if devices == 0 && rules.dead.is_none() {
            rules.dead = NONE.dead;
        }
        Ok(Self {
            rules,
            devices: if rules.dead.is_some() { 0 } else { devices },
            memory: mib("FAKE_AMDHIP_MEMORY_MIB", 32_624)?,
            graphics: mib("FAKE_AMDHIP_GRAPHICS_MIB", 0)?,
            integrated: var("FAKE_AMDHIP_INTEGRATED").is_some_and(|text| text != "0"),
            gfx: var("FAKE_AMDHIP_GFX").unwrap_or_else(|| rules.gfx.to_owned()),
            bus,
            disturbed: number("FAKE_AMDHIP_DISTURBED", 0)?,
            pin_offset: number("FAKE_AMDHIP_PIN_OFFSET", 0)?,
            hang: hang.transpose()?,
            says,
        })
    }

    /// The nth number that a function gives: what the environment says, or the truth.
    pub(crate) fn says(&self, function: &str, nth: usize, truth: i64) -> i64 {
        let lie = self.says.iter().find(|(name, _)| name == function);
        lie.and_then(|(_, numbers)| numbers.get(nth).copied()).unwrap_or(truth)
    }

    /// Whether a fresh mapping reads zeros and loses writes for a while, as on the gfx12 cards.
    pub(crate) fn mappings_start_blind(&self) -> bool {
        self.rules.seven && self.gfx.starts_with("gfx12")
    }

    /// Whether a device of this number exists; its number as an index.
    pub(crate) fn device(&self, ordinal: i32) -> Option<usize> {
        usize::try_from(ordinal).ok().filter(|device| *device < self.devices)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(vars: &[(&str, &str)]) -> Result<Config, String> {
        Config::read(|name| vars.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned()))
    }

    #[test]
    fn nothing_said_is_a_7_14_with_one_card() {
        let config = read(&[]).unwrap();
        assert_eq!((config.rules.name, config.rules.version), ("7.14.1", 71_460_850));
        assert_eq!((config.devices, config.memory, config.graphics, config.bus), (1, 32_624 << 20, 0, 3));
        assert_eq!(config.gfx, "gfx942:sramecc+:xnack-");
        assert!(!config.mappings_start_blind());
    }

    #[test]
    fn names_are_known_or_refused() {
        for rules in ALL {
            assert_eq!(read(&[("FAKE_AMDHIP", rules.name)]).unwrap().rules.name, rules.name);
        }
        let refused = read(&[("FAKE_AMDHIP", "7.3")]).unwrap_err();
        assert!(refused.contains("\"7.3\"") && refused.contains("7.2.4"), "{refused}");
        assert!(read(&[("FAKE_AMDHIP_DEVICES", "two")]).unwrap_err().contains("FAKE_AMDHIP_DEVICES"));
        assert!(read(&[("FAKE_AMDHIP_DEVICES", "65")]).is_err());
        assert!(read(&[("FAKE_AMDHIP_MEMORY_MIB", "99999999999999999")]).is_err());
    }

    #[test]
    fn blindness_is_the_cards_and_needs_a_seven() {
        assert!(read(&[("FAKE_AMDHIP", "gfx1201")]).unwrap().mappings_start_blind());
        let on = |version| read(&[("FAKE_AMDHIP", version), ("FAKE_AMDHIP_GFX", "gfx1200")]).unwrap();
        assert!(on("7.2.4").mappings_start_blind());
        assert!(!on("6.4.3").mappings_start_blind());
        let gfx = [("FAKE_AMDHIP", "gfx1201"), ("FAKE_AMDHIP_GFX", "gfx1100")];
        assert!(!read(&gfx).unwrap().mappings_start_blind());
    }

    #[test]
    fn a_call_that_hangs_has_a_function_and_a_number() {
        let hang = |text| read(&[("FAKE_AMDHIP_HANG", text)]).map(|config| config.hang);
        assert_eq!(hang("hipInit"), Ok(Some(("hipInit".to_owned(), 1))));
        assert_eq!(hang("hipMemMap:12"), Ok(Some(("hipMemMap".to_owned(), 12))));
        assert!(hang("hipMemMap:two").unwrap_err().contains("FAKE_AMDHIP_HANG"));
    }

    #[test]
    fn functions_say_what_they_are_told_to() {
        let config = read(&[("FAKE_AMDHIP_SAYS", "hipGetDeviceCount=-1;hipMemGetInfo=10,5")]).unwrap();
        assert_eq!(config.says("hipGetDeviceCount", 0, 2), -1);
        assert_eq!([0, 1, 2].map(|nth| config.says("hipMemGetInfo", nth, 7)), [10, 5, 7]);
        assert_eq!(config.says("hipRuntimeGetVersion", 0, 7), 7);
        assert!(read(&[("FAKE_AMDHIP_SAYS", "hipGetDeviceCount=many")]).is_err());
    }

    #[test]
    fn no_devices_is_no_device() {
        assert_eq!(read(&[("FAKE_AMDHIP_DEVICES", "0")]).unwrap().rules.dead, Some(100));
        assert_eq!(read(&[("FAKE_AMDHIP_PCI", "0xc0")]).unwrap().bus, 192);
    }
}
