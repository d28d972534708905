use std::os::unix::fs::{MetadataExt, PermissionsExt};

use super::*;

const SERVER: IpAddr = IpAddr::V4(margay_core::name::HOST_V4);

fn place() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("resolv.conf");
    (dir, path)
}

fn up(path: &Path) -> Before {
    let before = look(path).expect("looked at").before;
    apply(path, &before, SERVER).expect("applied");
    before
}

#[test]
fn a_file_comes_back_byte_for_byte_with_mode_and_inode() {
    for content in [&b"nameserver 10.0.0.53\nsearch x\n"[..], b"", b"nameserver 10.0.0.53", b"\xff\xfe\n"] {
        let (_dir, path) = place();
        fs::write(&path, content).expect("written");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).expect("set");
        let inode = fs::metadata(&path).expect("there").ino();
        let before = up(&path);
        let servers = servers(&fs::read(&path).expect("read"));
        assert_eq!(servers[0], "198.18.0.1");
        assert!(servers.len() > 1, "never the only one");
        assert_eq!(undo(&path, &before, SERVER).expect("undone"), Undone::Restored);
        assert_eq!(fs::read(&path).expect("read"), content);
        let about = fs::metadata(&path).expect("there");
        assert_eq!((about.mode() & 0o777, about.ino()), (0o640, inode));
        assert_eq!(undo(&path, &before, SERVER).expect("again"), Undone::NothingToDo);
    }
}

#[test]
fn a_link_comes_back_and_its_target_is_untouched() {
    let (dir, path) = place();
    let target = dir.path().join("run.conf");
    fs::write(&target, "nameserver 10.0.0.53\n").expect("written");
    symlink("run.conf", &path).expect("linked");
    let before = up(&path);
    assert_eq!(servers(&fs::read(&path).expect("read")), ["198.18.0.1", "10.0.0.53"]);
    assert_eq!(fs::read_to_string(&target).expect("read"), "nameserver 10.0.0.53\n");
    assert_eq!(undo(&path, &before, SERVER).expect("undone"), Undone::Restored);
    assert_eq!(fs::read_link(&path).expect("a link"), Path::new("run.conf"));
}

#[test]
fn nothing_comes_back_as_nothing_and_a_dangling_link_as_one() {
    let (_dir, path) = place();
    let before = up(&path);
    assert_eq!(before, Before::Absent);
    assert_eq!(undo(&path, &before, SERVER).expect("undone"), Undone::Restored);
    assert!(!path.exists());
    symlink("nowhere", &path).expect("linked");
    let before = up(&path);
    assert_eq!(undo(&path, &before, SERVER).expect("undone"), Undone::Restored);
    assert_eq!(fs::read_link(&path).expect("a link"), Path::new("nowhere"));
}

#[test]
fn what_others_wrote_since_is_theirs() {
    let (_dir, path) = place();
    fs::write(&path, "nameserver 10.0.0.53\n").expect("written");
    let before = up(&path);
    fs::write(&path, "nameserver 10.9.9.9\n").expect("a DHCP client");
    assert_eq!(undo(&path, &before, SERVER).expect("undone"), Undone::Foreign);
    assert_eq!(fs::read_to_string(&path).expect("read"), "nameserver 10.9.9.9\n");
    fs::write(&path, "nameserver 198.18.0.1\nnameserver 10.9.9.9\n").expect("an editor");
    assert_eq!(undo(&path, &before, SERVER).expect("undone"), Undone::OnlyOurs);
    assert_eq!(fs::read_to_string(&path).expect("read"), "nameserver 10.9.9.9\n");
}

#[test]
fn a_torn_write_is_restored() {
    let (_dir, path) = place();
    fs::write(&path, "nameserver 10.0.0.53\n").expect("written");
    let before = up(&path);
    let whole = fs::read(&path).expect("read");
    for len in [0, 10, COMMENT.len() + 5] {
        fs::write(&path, &whole[..len]).expect("torn");
        assert_eq!(undo(&path, &before, SERVER).expect("undone"), Undone::Restored, "{len}");
        assert_eq!(fs::read_to_string(&path).expect("read"), "nameserver 10.0.0.53\n");
    }
}

#[test]
fn a_directory_in_its_place_is_an_error() {
    let (_dir, path) = place();
    fs::create_dir(&path).expect("made");
    assert_eq!(look(&path).expect_err("refused").kind(), io::ErrorKind::InvalidData);
}
