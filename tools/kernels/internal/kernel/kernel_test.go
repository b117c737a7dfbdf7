package kernel

import (
	"slices"
	"testing"
)

func TestNewestIsByNumber(t *testing.T) {
	t.Parallel()
	for want, names := range map[string][]string{
		"linux-image-6.1.0-56-cloud-amd64":        {"linux-image-6.1.0-9-cloud-amd64", "linux-image-6.1.0-56-cloud-amd64", "linux-image-6.1.0-47-cloud-amd64"},
		"linux-image-6.12.117+deb12-cloud-amd64":  {"linux-image-6.12.117+deb12-cloud-amd64", "linux-image-6.12.99+deb12-cloud-amd64"},
		"linux-image-6.12.5-2+deb12-cloud-amd64":  {"linux-image-6.12.5-2+deb12-cloud-amd64", "linux-image-6.12.5-1+deb12-cloud-amd64"},
		"linux-image-6.1.10-1-cloud-amd64":        {"linux-image-6.1.9-30-cloud-amd64", "linux-image-6.1.10-1-cloud-amd64"},
		"linux-image-6.12.0+deb12-cloud-amd64":    {"linux-image-6.12.0+deb12-cloud-amd64"},
		"linux-image-6.12.107+deb13-cloud-amd64x": {"linux-image-6.12.107+deb12-cloud-amd64", "linux-image-6.12.107+deb13-cloud-amd64x"},
	} {
		if have := slices.MaxFunc(names, byNumbers); have != want {
			t.Errorf("newest of %v: %s, want %s", names, have, want)
		}
	}
}
