package apitest

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"k8s.io/client-go/rest"
)

// Restart kills the API server, lets it be away for a while, starts it again with the same arguments, and
// returns when it answers. Its etcd goes on.
func (s *Server) Restart(t testing.TB, away time.Duration) {
	t.Helper()
	config := s.Config(t)
	pid, args, err := find(config)
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatalf("kill the API server: %v", err)
	}
	<-time.After(away)
	// It ends at once when a connection has its port, as one may that began while it was away.
	giveUp := time.Now().Add(serverTimeout)
	for err = errEnded; errors.Is(err, errEnded) && time.Now().Before(giveUp); {
		s.stopRestarted()
		cmd := exec.Command(args[0], args[1:]...) //nolint:noctx // it outlives the test, until Run stops it
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
		if err := cmd.Start(); err != nil {
			t.Fatalf("start the API server again: %v", err)
		}
		ended := make(chan struct{})
		go func() {
			_ = cmd.Wait()
			close(ended)
		}()
		s.restarted, s.ended = cmd, ended
		err = awaitHealth(config, ended)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// errEnded is of a server that ended before it answered.
var errEnded = errors.New("the API server ended")

// stopRestarted ends a server that Restart started.
func (s *Server) stopRestarted() {
	if s.restarted != nil {
		_ = s.restarted.Process.Kill()
		<-s.ended
		s.restarted = nil
	}
}

// find returns the process of the API server behind config, and its arguments.
func find(config *rest.Config) (pid int, args []string, err error) {
	u, err := url.Parse(config.Host)
	if err != nil {
		return 0, nil, err
	}
	port := u.Port()
	if port == "" { // host:port without a scheme
		port = strings.TrimSuffix(config.Host[strings.LastIndex(config.Host, ":")+1:], "/")
	}
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		return 0, nil, err
	}
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err != nil || !bytes.Contains(text, []byte("--secure-port="+port+"\x00")) {
			continue
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(f)))
		if err != nil {
			continue
		}
		return pid, strings.Split(strings.TrimSuffix(string(text), "\x00"), "\x00"), nil
	}
	return 0, nil, fmt.Errorf("no process listens on port %s of the API server", port)
}

// awaitHealth waits until the API server answers, or has ended.
func awaitHealth(config *rest.Config, ended <-chan struct{}) error {
	client, err := rest.HTTPClientFor(config)
	if err != nil {
		return err
	}
	host := strings.TrimSuffix(config.Host, "/")
	if !strings.HasPrefix(host, "https://") {
		host = "https://" + host
	}
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(serverTimeout)
	for {
		resp, err := client.Get(host + "/readyz") //nolint:noctx // the deadline below bounds the loop
		if err == nil {
			var body []byte
			if body, err = io.ReadAll(resp.Body); err == nil {
				err = fmt.Errorf("%s %s: %s", resp.Request.URL, resp.Status, body)
			}
			_ = resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				return nil
			}
		}
		select {
		case <-deadline:
			return fmt.Errorf("the API server does not answer %s after its restart: %w", serverTimeout, err)
		case <-ended:
			return errEnded
		case <-tick.C:
		}
	}
}
