// Package version returns the version of the binary.
package version

import (
	"fmt"
	"runtime"
	"runtime/debug"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
)

// These are set in a release build (tools/compile): -ldflags "-X github.com/isthmus-net/isthmus/cmd/internal/version.release=v1.2.3".
var (
	release string
	commit  string
	date    string // of the commit, RFC 3339
)

// Info is the version of a binary, as `isthmusctl version` and the metric isthmus_build_info report it.
type Info struct {
	Version string `json:"version"`
	Commit  string `json:"commit,omitempty"`
	Date    string `json:"date,omitempty"` // of the commit, RFC 3339
	Go      string `json:"go"`
}

// Get returns the version of this binary.
func Get() Info {
	return Info{Version: String(), Commit: commit, Date: date, Go: runtime.Version()}
}

// Metric returns isthmus_build_info, which is 1. Its labels are the version of this binary.
func Metric() prometheus.Collector {
	i := Get()
	g := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "isthmus_build_info", Help: "Version of this program, in the labels; the value is 1.",
		ConstLabels: prometheus.Labels{"version": i.Version, "commit": i.Commit, "date": i.Date, "goversion": i.Go},
	})
	g.Set(1)
	return g
}

// Chart returns the version of the chart that belongs to this binary, "" without a release.
func Chart() string { return strings.TrimPrefix(release, "v") }

// Long returns the release with its commit and date, for --version.
func Long() string {
	if release == "" {
		return String()
	}
	return fmt.Sprintf("%s (commit %.12s of %s)", release, commit, date)
}

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
	revision := settings["vcs.revision"]
	if revision == "" {
		return "dev"
	}
	if len(revision) > 12 {
		revision = revision[:12]
	}
	if settings["vcs.modified"] == "true" {
		return fmt.Sprintf("dev-%s-modified", revision)
	}
	return "dev-" + revision
}
