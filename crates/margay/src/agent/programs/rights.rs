//! Who may bind which name: root any, others what the configuration grants them.

use std::ffi::CString;

use margay_core::fair_table::Peer;
use margay_core::name::Prefix;
use nix::unistd::{Gid, Group, Uid, User, getgrouplist};

use crate::agent::health::processes::Process;
use crate::config::{BindSection, Config};

/// `NAME:FIRST:COUNT` lines: user IDs that a user may have in user namespaces.
const SUBORDINATE_IDS: &str = "/etc/subuid";

/// The agent's own user counts as root.
fn is_root(uid: Uid) -> bool {
    uid.is_root() || uid == Uid::effective()
}

/// Whose share a user takes of what is bounded.
pub fn peer_of(uid: Uid) -> Peer {
    if is_root(uid) { Peer::Own } else { Peer::User(account(uid.as_raw())) }
}

fn subordinate_ids() -> String {
    std::fs::read_to_string(SUBORDINATE_IDS).unwrap_or_default()
}

/// The user that a user ID counts for on this host.
pub fn account(uid: u32) -> u32 {
    account_of(uid, &subordinate_ids())
}

/// The user that a user ID counts for: the one that `subordinate_ids` give it to, who has 65,536 of them. Those that
/// are given to root, for containers, count as the first of their range: never as root.
fn account_of(uid: u32, subordinate_ids: &str) -> u32 {
    let range = |line: &str| {
        let mut fields = line.trim().split(':');
        let (owner, first, count) = (fields.next()?.to_owned(), fields.next()?, fields.next()?);
        let (first, count): (u32, u32) = (first.parse().ok()?, count.parse().ok()?);
        uid.checked_sub(first).is_some_and(|at| at < count).then_some((owner, first))
    };
    let Some((owner, first)) = subordinate_ids.lines().find_map(range) else { return uid };
    let named = || User::from_name(&owner).ok().flatten().map(|user| user.uid.as_raw());
    owner.parse().ok().or_else(named).filter(|owner| *owner != 0).unwrap_or(first)
}

/// Who is at the other end of a connection, as the kernel says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caller {
    /// User.
    pub uid: Uid,
    /// Group.
    pub gid: Gid,
    /// Process, at the time when it connected.
    pub pid: i32,
    /// The process that had this number when the connection was accepted; `None`: it had ended.
    pub process: Option<Process>,
}

impl Caller {
    /// Whose share it takes of what is bounded.
    pub fn peer(&self) -> Peer {
        peer_of(self.uid)
    }

    /// The user that it counts for.
    pub fn account(&self) -> u32 {
        account(self.uid.as_raw())
    }

    /// For people: `alice (pid 12, server)`.
    pub fn describe(&self) -> String {
        let program = std::fs::read_to_string(format!("/proc/{}/comm", self.pid)).unwrap_or_default();
        format!("{} (pid {} of {})", program.trim(), self.pid, self.user())
    }

    /// The user's name, or number.
    pub fn user(&self) -> String {
        User::from_uid(self.uid).ok().flatten().map_or_else(|| self.uid.to_string(), |user| user.name)
    }

    /// Whether a section is about this user, or one of its groups. Looked up each time: users come and go while the
    /// agent runs.
    fn is_meant(&self, section: &BindSection) -> bool {
        let user = section.user.as_deref().and_then(|name| User::from_name(name).ok().flatten());
        user.is_some_and(|user| user.uid == self.uid) || section.group.as_deref().is_some_and(|name| self.is_in(name))
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
        if is_root(who.uid) {
            return Ok(());
        }
        let covers = |section: &&BindSection| section.names.iter().any(|name| name.0.prefix().covers(prefix));
        let is_operator = self.operators.as_deref().is_some_and(|name| who.is_in(name));
        if is_operator || self.grants.iter().filter(covers).any(|section| who.is_meant(section)) {
            return Ok(());
        }
        let user = who.user();
        Err(format!(
            "user {user} has no right to {written} on this host; root grants it with [[bind]] user = \"{user}\", \
             names = [\"{written}\"] in the agent's configuration, and `margay reload`"
        ))
    }

    /// From which other users a program may take sockets, and under which names.
    pub fn givers_for(&self, who: &Caller) -> Vec<OtherUser> {
        let mut givers = Vec::new();
        for section in self.grants.iter().filter(|section| who.is_meant(section)) {
            let names: Vec<Prefix> = section.names.iter().map(|name| name.0.prefix()).collect();
            let users = section.takes_from.iter().filter_map(|name| User::from_name(name).ok().flatten());
            givers.extend(users.map(|user| OtherUser { uid: user.uid, names: names.clone() }));
        }
        givers
    }
}

/// A user whose sockets a program of another one may take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OtherUser {
    uid: Uid,
    names: Vec<Prefix>,
}

impl OtherUser {
    /// A user by its number, and the names that sockets may have.
    #[cfg(test)]
    pub fn new(uid: Uid, names: Vec<Prefix>) -> Self {
        Self { uid, names }
    }

    /// Whether a socket of this name may be taken from `giver`.
    pub fn may_give(&self, giver: &Caller, name: &Prefix) -> bool {
        self.uid == giver.uid && self.names.iter().any(|own| own.covers(name))
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
        Caller { uid: user.uid, gid: user.gid, pid: 1, process: None }
    }

    #[test]
    fn user_ids_of_a_range_count_for_its_owner_and_never_for_root() {
        let ranges = "# no line\n1000:100000:65536\nroot:200000:65536\nnobody:300000:10\nnone:400000:10\n";
        let owner = |uid| account_of(uid, ranges);
        assert_eq!([0, 1000, 99_999, 100_000, 165_535, 165_536].map(owner), [0, 1000, 99_999, 1000, 1000, 165_536]);
        assert_eq!([200_000, 265_535, 400_003].map(owner), [200_000, 200_000, 400_000]);
        assert_eq!(owner(300_009), nobody().uid.as_raw());
        assert_eq!(peer_of(Uid::from_raw(0)), Peer::Own);
    }

    fn may(rights: &Rights, who: &Caller, name: &str) -> bool {
        rights.check(who, &name.parse().expect("a name"), name).is_ok()
    }

    #[test]
    fn root_may_all_and_others_nothing_unless_it_is_granted() {
        let (none, root) =
            (Rights::default(), Caller { uid: Uid::from_raw(0), gid: Gid::from_raw(0), pid: 1, process: None });
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
    fn sockets_of_other_users_are_taken_where_a_section_says_so() {
        let text = "[[bind]]\nuser = \"nobody\"\nnames = [\"web.shop\"]\ntakes_from = [\"root\", \"no-such-user\"]\n\
                    [[bind]]\nuser = \"nobody\"\nnames = [\"db.shop\"]";
        let granted = rights(text);
        let root = Caller { uid: Uid::from_raw(0), gid: Gid::from_raw(0), pid: 1, process: None };
        let givers = granted.givers_for(&nobody());
        let may = |giver: &Caller, name: &str| {
            let name: Prefix = name.parse().expect("a name");
            givers.iter().any(|other| other.may_give(giver, &name))
        };
        assert!(may(&root, "web.shop"));
        assert!(!may(&root, "db.shop"), "that section names nobody");
        assert!(!may(&Caller { uid: Uid::from_raw(54_321), ..root }, "web.shop"));
        assert_eq!(granted.givers_for(&root), [], "nobody's sockets stay nobody's");
    }

    #[test]
    fn a_group_counts_by_the_process_and_by_the_users_memberships() {
        let group = Group::from_gid(nobody().gid).expect("groups").expect("it has a name").name;
        let granted = rights(&format!("[[bind]]\ngroup = \"{group}\"\nnames = [\"web.shop\"]"));
        assert!(may(&granted, &nobody(), "web.shop"));
        let other = Caller { uid: Uid::from_raw(54_321), gid: Gid::from_raw(54_321), pid: 1, process: None };
        assert!(!may(&granted, &other, "web.shop"));
        assert!(may(&granted, &Caller { gid: nobody().gid, ..other }, "web.shop"));
        let operators = rights(&format!("[host]\ngroup = \"{group}\""));
        assert!(may(&operators, &nobody(), "adm.shop") && !may(&operators, &other, "adm.shop"));
        let gone = rights("[[bind]]\nuser = \"no-such-user\"\nnames = [\"web.shop\"]");
        assert!(!may(&gone, &other, "web.shop"), "whom nobody knows has no rights");
    }
}
