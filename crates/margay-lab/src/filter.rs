//! What gateways do to packets: masquerading and stateful filtering, by nftables.

use anyhow::Result;

use crate::host::Host;

/// Installs the rules of a gateway, as its plan says.
///
/// # Errors
///
/// `nft` refuses.
pub fn install(host: &Host) -> Result<()> {
    let interface = |subnet: usize| host.plan.links.iter().position(|link| link.subnet == subnet);
    let mut rules = Vec::new();
    if let Some(outer) = host.plan.nat.and_then(interface) {
        rules.push("add table inet lab_nat".to_owned());
        rules.push("add chain inet lab_nat post { type nat hook postrouting priority srcnat; }".into());
        rules.push(format!("add rule inet lab_nat post oifname eth{outer} masquerade"));
        // A NAT knows nobody behind it whom it was not asked for.
        rules.push("add chain inet lab_nat forward { type filter hook forward priority filter; }".into());
        rules.push(format!("add rule inet lab_nat forward iifname eth{outer} ct state established,related accept"));
        rules.push(format!("add rule inet lab_nat forward iifname eth{outer} drop"));
    }
    if let Some(outer) = host.plan.firewall.and_then(interface) {
        rules.push("add table inet lab_firewall".to_owned());
        rules.push("add chain inet lab_firewall forward { type filter hook forward priority filter; }".into());
        rules.push("add rule inet lab_firewall forward ct state invalid drop".into());
        rules
            .push(format!("add rule inet lab_firewall forward iifname eth{outer} ct state established,related accept"));
        rules.push(format!("add rule inet lab_firewall forward iifname eth{outer} drop"));
    }
    if rules.is_empty() {
        return Ok(());
    }
    host.run(["nft".to_owned(), rules.join("; ")]).map(drop)
}
