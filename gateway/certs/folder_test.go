package certs

import (
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"
)

const year = 365 * 24 * time.Hour

// update updates a folder and returns the written identities.
func update(t *testing.T, f Folder, o Order, now time.Time) (written []string) {
	t.Helper()
	o.Life = year
	done, err := f.Update(o, now)
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range done {
		written = append(written, d.Identity)
	}
	return written
}

// Good certificates stay. Expiring, missing and requested ones are created.
func TestUpdate(t *testing.T) {
	f := Folder{filepath.Join(t.TempDir(), "certs")}
	now := time.Now()
	for i, tt := range []struct {
		order Order
		at    time.Time
		want  int
	}{
		{Order{Identities: []string{Controller, "gw-1"}}, now, 2},
		{Order{Identities: []string{Controller, "gw-1"}}, now, 0},
		{Order{Identities: []string{"gw-2"}}, now, 1},
		{Order{}, now.Add(year / 2), 0},
		{Order{}, now.Add(year * 3 / 4), 3},
		{Order{Renew: true}, now.Add(year * 3 / 4), 3},
	} {
		if have := update(t, f, tt.order, tt.at); len(have) != tt.want {
			t.Errorf("%d: written %v, want %d", i, have, tt.want)
		}
	}
	for _, name := range []string{"../gw", "", "GW", "gw-"} {
		if _, err := f.Update(Order{Identities: []string{name}, Life: year}, now); err == nil {
			t.Errorf("%q is an identity", name)
		}
	}
	if err := os.Remove(f.Files("gw-1").Key); err != nil {
		t.Fatal(err)
	}
	if have := update(t, f, Order{}, now.Add(year*3/4)); len(have) != 1 {
		t.Errorf("a key is missing, and written are %v", have)
	}
	for _, name := range []string{authorityFile, "gw-1/tls.key"} {
		if info, err := os.Stat(filepath.Join(f.Path, name)); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v, %v", name, info.Mode(), err)
		}
	}
}

// During each step of a rotation, two programs trust each other even if only one has the files of the step.
func TestChangeAuthority(t *testing.T) {
	f := Folder{t.TempDir()}
	update(t, f, Order{Identities: []string{Controller, "gw-1"}}, time.Now())
	for _, step := range []Step{Use, End, "again"} {
		if _, err := f.Update(Order{Step: step, Life: year}, time.Now()); err == nil {
			t.Errorf("%q came before %q", step, Begin)
		}
	}
	installed := newFolder(t)
	install := func() {
		t.Helper()
		from := f.Files("gw-1")
		for to, from := range map[string]string{installed.Cert: from.Cert, installed.Key: from.Key, installed.CA: from.CA} {
			b, err := os.ReadFile(from)
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(to, b, 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	install()
	s := installed.open(t)
	c, err := Open(f.Files(Controller), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	for _, step := range []Step{Begin, Use, End} {
		if have := update(t, f, Order{Step: step}, time.Now()); len(have) != 2 {
			t.Errorf("%s: written are %v", step, have)
		}
		for _, when := range []string{"before", "after"} {
			if atServer, atClient := shake(s.Server(), c.Client("gw-1")); atServer != nil || atClient != nil {
				t.Errorf("%s, %s the gateway has its files: %v, %v", step, when, atServer, atClient)
			}
			install()
		}
		if have := update(t, f, Order{}, time.Now()); len(have) != 0 {
			t.Errorf("%s: again written are %v", step, have)
		}
		if step == Begin {
			if _, err := f.Update(Order{Step: End, Life: year}, time.Now()); err == nil {
				t.Error("an authority ends while it signs")
			}
		}
	}
}
