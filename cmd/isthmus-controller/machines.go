package main

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"

	"k8s.io/client-go/rest"
	"sigs.k8s.io/yaml"

	"github.com/isthmus-net/isthmus/cmd/internal/status"
	"github.com/isthmus-net/isthmus/controlplane/workloads"
	"github.com/isthmus-net/isthmus/controlplane/workloads/neutron"
	"github.com/isthmus-net/isthmus/controlplane/workloads/nova"
	"github.com/isthmus-net/isthmus/controlplane/workloads/octavia"
)

// Services of machines need these additional rights. The chart grants them with controller.federation.
//
// +kubebuilder:rbac:groups="",resources=services,verbs=create;update;delete
// +kubebuilder:rbac:groups=discovery.k8s.io,resources=endpointslices,verbs=update
// +kubebuilder:rbac:groups=federation.isthmus.dev,resources=externalworkloads,verbs=list;watch
// +kubebuilder:rbac:groups=federation.isthmus.dev,resources=externalworkloads/status,verbs=update
// +kubebuilder:rbac:groups=networking.k8s.io,resources=networkpolicies,verbs=list;watch
// +kubebuilder:rbac:groups=crd.antrea.io,resources=externalnodes,verbs=get;list;watch;create;update;delete

// newMachines returns the controller of Services of machines.
func newMachines(s settings, local *rest.Config, log *slog.Logger) (*workloads.Controller, error) {
	cfg := workloads.Config{Local: local, Clouds: map[string]workloads.Cloud{}, Log: log}
	if s.machines != "" {
		var err error
		if cfg.Settings, err = readMachines(s.machines); err != nil {
			return nil, err
		}
	}
	for _, c := range cfg.Settings.Clouds {
		of := workloads.Cloud{Servers: nova.New(nova.Config{Cloud: c.Name, File: s.clouds, Network: c.Network})}
		if c.LoadBalancers {
			of.LoadBalancers = octavia.New(octavia.Config{Cloud: c.Name, File: s.clouds})
		}
		if c.SecurityGroups != "" {
			of.Enforcer = neutron.New(neutron.Config{Cloud: c.Name, File: s.clouds})
		}
		cfg.Clouds[c.Name] = of
	}
	return workloads.New(cfg)
}

// readMachines reads the file of --machines. Unknown fields are errors.
func readMachines(path string) (workloads.Settings, error) {
	var s workloads.Settings
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return s, fmt.Errorf("--machines=%s does not exist; give the path of the cloud settings", path)
	}
	if err == nil {
		err = yaml.UnmarshalStrict(text, &s)
	}
	if err == nil {
		err = s.Complete()
	}
	if err != nil {
		return s, fmt.Errorf("--machines=%s: %w", path, err)
	}
	return s, nil
}

// describeMachines adds the problems and clouds of s to a status.
func describeMachines(to *status.Federation, s workloads.State) {
	to.MachineProblems = s.Problems
	for _, c := range s.Clouds {
		is := status.Cloud{Name: c.Name, Servers: c.Servers, LoadBalancers: c.LoadBalancers}
		if c.Err != nil {
			is.Error = c.Err.Error()
		}
		to.Clouds = append(to.Clouds, is)
	}
}
