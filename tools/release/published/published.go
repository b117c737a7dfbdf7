// Package published lists the releases of Isthmus, and candidates for one, with their commits, and the public keys that sign them. Upgrades
// are tested from the newest release.
package published

import (
	"bytes"
	_ "embed"
	"encoding/pem"
	"errors"
	"fmt"
	"slices"
	"strings"
)

//go:embed releases.txt
var list string

// Release is a version, such as v0.1.0, and its commit.
type Release struct{ Version, Commit string }

// Releases returns all releases, the newest first.
func Releases() ([]Release, error) {
	var all []Release
	for line := range strings.Lines(list) {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		version, commit, ok := strings.Cut(line, " ")
		if !ok || !strings.HasPrefix(version, "v") || len(commit) != 40 {
			return nil, fmt.Errorf("releases.txt: %q is not a version and a commit", line)
		}
		all = append(all, Release{version, commit})
	}
	return all, nil
}

// Check returns an error if a version is published of another commit.
func Check(version, commit string) error {
	all, err := Releases()
	if err != nil {
		return err
	}
	at := slices.IndexFunc(all, func(r Release) bool { return r.Version == version })
	if at >= 0 && all[at].Commit != commit {
		return fmt.Errorf("%s is of commit %s, and this is %s: check that commit out, or choose the next version", version, all[at].Commit, commit)
	}
	return nil
}

//go:embed KEYS
var keys []byte

// CheckKey returns an error if a public key (PEM) is not the newest one of KEYS, with which users compare it.
func CheckKey(public []byte) error { return checkKey(keys, public) }

func checkKey(keys, public []byte) error {
	given, _ := pem.Decode(public)
	if given == nil {
		return errors.New("it is not a public key in PEM")
	}
	newest, _ := pem.Decode(keys)
	if newest == nil || !bytes.Equal(newest.Bytes, given.Bytes) {
		return fmt.Errorf("its public key is not the newest of tools/release/published/KEYS, with which users compare it; commit it there first:\n%s", public)
	}
	return nil
}
