// Package setup prepares the programs that the control plane benchmarks start.
package setup

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/go-logr/logr"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"

	"github.com/isthmus-net/isthmus/tools/scale/simulation"
)

// Programs are the programs of one run, and the folder for etcd's files.
type Programs struct {
	// Assets is a folder with kube-apiserver and etcd, Controller the path of isthmus-controller.
	Assets, Controller string
	Storage            string

	dir string
}

// New finds or builds the programs, and silences the loggers of Kubernetes' libraries. The caller closes the result.
func New(ctx context.Context, progress io.Writer) (_ *Programs, err error) {
	klog.SetLogger(logr.Discard())
	ctrl.SetLogger(logr.Discard())
	p := &Programs{Storage: simulation.DefaultStorage()}
	if p.Assets, err = simulation.Assets(ctx, progress); err != nil {
		return nil, err
	}
	if p.dir, err = os.MkdirTemp("", "isthmus-bench-"); err != nil {
		return nil, fmt.Errorf("make folder: %w", err)
	}
	if p.Controller, err = simulation.BuildController(ctx, p.dir); err != nil {
		return nil, errors.Join(err, p.Close())
	}
	fmt.Fprintln(progress, simulation.DescribeStorage(p.Storage))
	return p, nil
}

// Close removes the programs that New built.
func (p *Programs) Close() error { return os.RemoveAll(p.dir) }
