package netlab

import (
	"net"
	"testing"
)

// Answer calls answer with every connection that l accepts, one at a time, and closes the connection. It closes l at the end
// of the test.
func Answer(t testing.TB, l net.Listener, answer func(net.Conn)) {
	t.Helper()
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			answer(c)
			_ = c.Close()
		}
	}()
}
