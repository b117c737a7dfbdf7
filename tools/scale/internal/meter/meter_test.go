package meter

import (
	"io"
	"net"
	"testing"
)

// TestMeter sends 5 bytes to a server that answers with 10.
func TestMeter(t *testing.T) {
	t.Parallel()
	server, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	go func() {
		for {
			c, err := server.Accept()
			if err != nil {
				return
			}
			go func() {
				asked := make([]byte, 5)
				if _, err := io.ReadFull(c, asked); err == nil {
					_, _ = c.Write(append(asked, asked...))
				}
				_, _ = io.Copy(io.Discard, c)
				_ = c.Close()
			}()
		}
	}()
	m, err := New(t.Context(), server.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()

	var open net.Conn
	for range 3 {
		if open, err = net.Dial("tcp", m.Address()); err != nil {
			t.Fatal(err)
		}
		if _, err := open.Write([]byte("hello")); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(open, make([]byte, 10)); err != nil {
			t.Fatal(err)
		}
	}
	if m.Sent() != 15 || m.Received() != 30 {
		t.Errorf("%d bytes sent and %d received, want 15 and 30", m.Sent(), m.Received())
	}
	m.Close()
	if _, err := open.Read(make([]byte, 1)); err == nil {
		t.Error("a connection outlives the meter")
	}
	if c, err := net.Dial("tcp", m.Address()); err == nil {
		_ = c.Close()
		t.Error("a closed meter takes connections")
	}
}

// A stopped server looks the same through the meter as without it: the connection ends.
func TestServerAway(t *testing.T) {
	t.Parallel()
	gone, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	_ = gone.Close()
	m, err := New(t.Context(), gone.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	c, err := net.Dial("tcp", m.Address())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Read(make([]byte, 1)); err == nil {
		t.Error("something came from a server that is away")
	}
}
