// Package version returns the version of the binary.
package version

import (
	"fmt"
	"runtime/debug"
)

// release is set in a release build: -ldflags "-X github.com/isthmus-net/isthmus/cmd/internal/version.release=v1.2.3".
var release string

// String returns the release. Without one it returns the commit of the build, and without that "dev".
func String() string {
	if release != "" {
		return release
	}
	build, ok := debug.ReadBuildInfo()
	if !ok {
		return "dev"
	}
	settings := map[string]string{}
	for _, s := range build.Settings {
		settings[s.Key] = s.Value
	}
	commit := settings["vcs.revision"]
	if commit == "" {
		return "dev"
	}
	if len(commit) > 12 {
		commit = commit[:12]
	}
	if settings["vcs.modified"] == "true" {
		return fmt.Sprintf("dev-%s-modified", commit)
	}
	return "dev-" + commit
}
