import java.net.DatagramPacket;
import java.net.DatagramSocket;
import java.net.InetAddress;
import java.net.ServerSocket;
import java.net.Socket;

/** Tells each client the address that it is seen by: PROTOCOL PORT ADDRESS. */
public class Server {
    public static void main(String[] words) throws Exception {
        int port = Integer.parseInt(words[1]);
        InetAddress address = InetAddress.getByName(words[2]);
        if (words[0].equals("udp")) {
            serveDatagrams(new DatagramSocket(port, address));
        }
        try (ServerSocket listener = new ServerSocket(port, 64, address)) {
            while (true) {
                try (Socket connection = listener.accept()) {
                    connection.getInputStream().read(new byte[64]);
                    connection.getOutputStream().write(connection.getInetAddress().getHostAddress().getBytes());
                }
            }
        }
    }

    private static void serveDatagrams(DatagramSocket socket) throws Exception {
        while (true) {
            DatagramPacket asked = new DatagramPacket(new byte[2048], 2048);
            socket.receive(asked);
            byte[] seen = asked.getAddress().getHostAddress().getBytes();
            socket.send(new DatagramPacket(seen, seen.length, asked.getSocketAddress()));
        }
    }
}
