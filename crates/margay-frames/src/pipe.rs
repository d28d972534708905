//! A program's connection that is read and written as far as there is room now.

use std::io;

use tokio::net::TcpStream;

/// Bytes that are read at once.
const READ_LEN: usize = 64 << 10;

/// What reading has given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Read {
    /// The program has sent something.
    Some,
    /// It has sent nothing since.
    Nothing,
    /// It sends no more.
    End,
}

/// Appends what the program has sent to `unread`.
///
/// # Errors
///
/// The connection has failed.
pub(crate) fn read(stream: &TcpStream, unread: &mut Vec<u8>) -> io::Result<Read> {
    let len = unread.len();
    unread.resize(len + READ_LEN, 0);
    let read = stream.try_read(&mut unread[len..]);
    unread.truncate(len + *read.as_ref().unwrap_or(&0));
    match read {
        Ok(0) => Ok(Read::End),
        Ok(_) => Ok(Read::Some),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(Read::Nothing),
        Err(error) => Err(error),
    }
}

/// Gives the program as much of `unwritten` as it takes.
///
/// # Errors
///
/// The connection has failed.
pub(crate) fn write(stream: &TcpStream, unwritten: &mut Vec<u8>) -> io::Result<()> {
    match stream.try_write(unwritten) {
        Ok(written) => {
            unwritten.drain(..written);
            Ok(())
        }
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
        Err(error) => Err(error),
    }
}
