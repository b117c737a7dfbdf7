package installation

import (
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"helm.sh/helm/v4/pkg/action"
	"helm.sh/helm/v4/pkg/kube"
	"helm.sh/helm/v4/pkg/release"
	releasev1 "helm.sh/helm/v4/pkg/release/v1"
	"helm.sh/helm/v4/pkg/storage/driver"
	"k8s.io/cli-runtime/pkg/genericclioptions"
	"k8s.io/client-go/rest"
)

// ErrNotFound means that there is no Helm release of this name in the namespace.
var ErrNotFound = errors.New("no such Helm release")

// Installation is a Helm release of the chart.
type Installation struct {
	Name, Namespace string
	Revision        int
	config          *action.Configuration
	objects         []object // of the revision that is deployed
}

// Open reads the newest revision of a Helm release. It returns ErrNotFound if there is none, and an error that names the fix if an
// earlier command left the release in the middle of an operation.
func Open(cfg *rest.Config, namespace, name string) (*Installation, error) {
	config, err := configuration(cfg, namespace)
	if err != nil {
		return nil, err
	}
	i := &Installation{Name: name, Namespace: namespace, config: config}
	last, err := i.config.Releases.Last(name)
	if errors.Is(err, driver.ErrReleaseNotFound) {
		return nil, fmt.Errorf("%w: %s in namespace %s", ErrNotFound, name, namespace)
	}
	if err != nil {
		return nil, fmt.Errorf("read Helm release %s in namespace %s: %w", name, namespace, err)
	}
	r, err := v1(last)
	if err != nil {
		return nil, err
	}
	if r.Info.Status.IsPending() {
		return nil, fmt.Errorf("revision %d of Helm release %s is in state %q: another command works on it, or was interrupted; in the latter case run: helm rollback %s --namespace %s",
			r.Version, name, r.Info.Status, name, namespace)
	}
	i.Revision = r.Version
	i.objects, err = split(r.Manifest)
	return i, err
}

// configuration returns Helm's configuration for the cluster of cfg.
func configuration(cfg *rest.Config, namespace string) (*action.Configuration, error) {
	flags := genericclioptions.NewConfigFlags(false)
	flags.Namespace = &namespace
	flags.WrapConfigFn = func(*rest.Config) *rest.Config { return rest.CopyConfig(cfg) }
	c := action.NewConfiguration(action.ConfigurationSetLogger(slog.DiscardHandler))
	return c, c.Init(flags, namespace, "")
}

// v1 returns a release in the format of Helm 3 and 4.
func v1(r release.Releaser) (*releasev1.Release, error) {
	have, ok := r.(*releasev1.Release)
	if !ok {
		return nil, fmt.Errorf("the Helm release has the unknown format %T", r)
	}
	return have, nil
}

// Versions returns the versions of the installed objects, sorted. They are several after an interrupted upgrade.
func (i *Installation) Versions() []string {
	var all []string
	for _, o := range i.objects {
		if v := o.GetLabels()[labelVersion]; v != "" && !slices.Contains(all, v) {
			all = append(all, v)
		}
	}
	slices.Sort(all)
	return all
}

// Has reports whether a component is installed, by its label app.kubernetes.io/name.
func (i *Installation) Has(component string) bool {
	return slices.ContainsFunc(i.objects, func(o object) bool { return o.GetLabels()[labelName] == component })
}

// Uninstall removes the release, but objects that it is told to keep, and waits at most timeout until the pods are gone.
func (i *Installation) Uninstall(timeout time.Duration) error {
	u := action.NewUninstall(i.config)
	u.WaitStrategy, u.Timeout = kube.StatusWatcherStrategy, timeout
	u.DeletionPropagation = "foreground"
	if _, err := u.Run(i.Name); err != nil {
		return fmt.Errorf("uninstall Helm release %s: %w", i.Name, err)
	}
	return nil
}
