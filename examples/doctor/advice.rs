//! What to change where virtual memory is off.

use growspan::Reason;

/// What can be done about a reason.
pub(crate) fn on(reason: &Reason) -> String {
    match reason {
        Reason::NoSupport { .. } => {
            "update the driver; in a virtual machine, pass the card through or choose a profile \
                                     with unified memory"
                .to_owned()
        }
        Reason::KnownFault { .. } => {
            "move to a runtime without that fault, where the reason names one; to see what the \
                                      check says of this one all the same, set GROWSPAN_HIP_FORCE=1"
                .to_owned()
        }
        Reason::Granularity { .. } => "move to a runtime that maps in 2 MiB (ROCm 7.14 or later); to see whether this \
                                       one works all the same, open the device with Granularity::AtLeast2MiB, which \
                                       runs the rest of the check"
            .to_owned(),
        Reason::OddGranularity { .. } | Reason::Address { .. } | Reason::ReadBack { .. } => {
            "do not work around it: the driver does not do what it says; update driver and runtime, and report it"
                .to_owned()
        }
        Reason::OpenFiles { needed, hard, .. } if needed <= hard => {
            format!("raise the open-file limit: ulimit -n {needed}; the hard limit of {hard} allows it")
        }
        Reason::OpenFiles { needed, .. } => format!(
            "raise the hard limit of open files to {needed}: docker run --ulimit nofile={needed}:{needed}, \
             LimitNOFILE={needed} in a systemd unit, or /etc/security/limits.conf; or spend fewer files: \
             Sizing::Ladder, or DeviceOptions::arena for a part of the memory"
        ),
        Reason::MapEntries { needed, .. } => {
            format!("sysctl -w vm.max_map_count={needed}, as root; or use larger chunks (Sizing::Ladder)")
        }
        Reason::Call { .. } => {
            "update driver and runtime, and look at dmesg; in a container or a virtual machine, try \
                                outside of it first"
                .to_owned()
        }
        Reason::Memory { .. } => {
            "make sure that no other program takes or gives up memory meanwhile, and try again; if \
                                  it stays, the driver does not give memory back: update it"
                .to_owned()
        }
        Reason::Hang { .. } => "look at dmesg and restart the driver; if the machine is merely slow, allow more time \
                                with DeviceOptions::patience"
            .to_owned(),
        Reason::NotRun { .. } => "make sure that the process may start a thread (ulimit -u), and try again".to_owned(),
        Reason::Asked => "open the device without DeviceOptions::contiguous".to_owned(),
        _ => "look at the failed step above".to_owned(),
    }
}
