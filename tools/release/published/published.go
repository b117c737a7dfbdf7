// Package published lists the releases of Isthmus, and candidates for one, with their commits. Upgrades are tested from the newest one.
package published

import (
	_ "embed"
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
