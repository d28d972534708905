//! Who may bind which name: root any, others what the configuration grants them.

use std::ffi::CString;

use margay_core::name::Prefix;
use nix::unistd::{Gid, Group, Uid, User, getgrouplist};

use crate::config::{BindSection, Config};

/// Who is at the other end of a connection, as the kernel says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caller {
    /// User.
    pub uid: Uid,
    /// Group.
    pub gid: Gid,
    /// Process, at the time when it connected.
    pub pid: i32,
}

impl Caller {
    /// For people: `alice (pid 12, server)`.
    pub fn describe(&self) -> String {
        let program = std::fs::read_to_string(format!("/proc/{}/comm", self.pid)).unwrap_or_default();
        format!("{} (pid {} of {})", program.trim(), self.pid, self.user())
    }

    /// The user's name, or number.
    pub fn user(&self) -> String {
        User::from_uid(self.uid).ok().flatten().map_or_else(|| self.uid.to_string(), |user| user.name)
    }

    fn is_in(&self, group: &str) -> bool {
        let Some(group) = Group::from_name(group).ok().flatten() else { return false };
        let user = User::from_uid(self.uid).ok().flatten();
        let listed = user.and_then(|user| getgrouplist(&CString::new(user.name).ok()?, user.gid).ok());
        listed.into_iter().flatten().chain([self.gid]).any(|gid| gid == group.gid)
    }
}

/// What the configuration grants.
#[derive(Clone, Debug, Default)]
pub struct Rights {
    /// Whose members may do all that the API does, `margay run` with any name among it.
    operators: Option<String>,
    grants: Vec<BindSection>,
}

impl Rights {
    /// As the configuration has it.
    pub fn new(config: &Config) -> Self {
        let grants = config.bind.iter().map(|section| section.get_ref().clone()).collect();
        Self { operators: config.host.group.as_ref().map(|name| name.get_ref().clone()), grants }
    }

    /// Whether somebody may serve, or be called by, every name of a prefix.
    ///
    /// # Errors
    ///
    /// Not; the message says who could grant it, and how.
    pub fn check(&self, who: &Caller, prefix: &Prefix, written: &str) -> Result<(), String> {
        if who.uid.is_root() || who.uid == Uid::effective() {
            return Ok(());
        }
        let covers = |section: &&BindSection| section.names.iter().any(|name| name.0.prefix().covers(prefix));
        // Looked up each time: users come and go while the agent runs.
        let is_theirs = |section: &BindSection| {
            let user = section.user.as_deref().and_then(|name| User::from_name(name).ok().flatten());
            user.is_some_and(|user| user.uid == who.uid) || section.group.as_deref().is_some_and(|name| who.is_in(name))
        };
        let is_operator = self.operators.as_deref().is_some_and(|name| who.is_in(name));
        if is_operator || self.grants.iter().filter(covers).any(is_theirs) {
            return Ok(());
        }
        let user = who.user();
        Err(format!(
            "user {user} has no right to {written} on this host; root grants it with [[bind]] user = \"{user}\", \
             names = [\"{written}\"] in the agent's configuration, and `margay reload`"
        ))
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn rights(text: &str) -> Rights {
        Rights::new(&Config::parse(text, std::path::Path::new("margay.toml")).expect("a configuration"))
    }

    fn nobody() -> Caller {
        let user = User::from_name("nobody").expect("users").expect("every system has it");
        Caller { uid: user.uid, gid: user.gid, pid: 1 }
    }

    fn may(rights: &Rights, who: &Caller, name: &str) -> bool {
        rights.check(who, &name.parse().expect("a name"), name).is_ok()
    }

    #[test]
    fn root_may_all_and_others_nothing_unless_it_is_granted() {
        let (none, root) = (Rights::default(), Caller { uid: Uid::from_raw(0), gid: Gid::from_raw(0), pid: 1 });
        assert!(may(&none, &root, "web.shop") && may(&none, &root, "sid:/0"));
        let refused = none.check(&nobody(), &"web.shop".parse().expect("a name"), "web.shop").expect_err("refused");
        assert!(refused.contains("user nobody") && refused.contains("names = [\"web.shop\"]"), "{refused}");
    }

    #[test]
    fn a_grant_is_of_its_names_and_of_what_is_under_its_prefixes() {
        let granted = rights("[[bind]]\nuser = \"nobody\"\nnames = [\"web.shop\", \"sid:00112233/32\"]");
        for (name, is_granted) in [
            ("web.shop", true),
            ("adm.shop", false),
            ("web.shop/key:one", false),
            ("sid:0011223344/40", true),
            ("sid:00112233/32", true),
            ("sid:001122/24", false),
            ("sid:0011223355", true),
        ] {
            assert_eq!(may(&granted, &nobody(), name), is_granted, "{name}");
        }
    }

    #[test]
    fn a_group_counts_by_the_process_and_by_the_users_memberships() {
        let group = Group::from_gid(nobody().gid).expect("groups").expect("it has a name").name;
        let granted = rights(&format!("[[bind]]\ngroup = \"{group}\"\nnames = [\"web.shop\"]"));
        assert!(may(&granted, &nobody(), "web.shop"));
        let other = Caller { uid: Uid::from_raw(54_321), gid: Gid::from_raw(54_321), pid: 1 };
        assert!(!may(&granted, &other, "web.shop"));
        assert!(may(&granted, &Caller { gid: nobody().gid, ..other }, "web.shop"));
        let operators = rights(&format!("[host]\ngroup = \"{group}\""));
        assert!(may(&operators, &nobody(), "adm.shop") && !may(&operators, &other, "adm.shop"));
        let gone = rights("[[bind]]\nuser = \"no-such-user\"\nnames = [\"web.shop\"]");
        assert!(!may(&gone, &other, "web.shop"), "whom nobody knows has no rights");
    }
}
