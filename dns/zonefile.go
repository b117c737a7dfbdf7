package dns

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/isthmus-net/isthmus/controlplane/clusterset/signal"
	"github.com/isthmus-net/isthmus/dns/internal/zone"
)

// saveInterval is the time between two writes of the file. An agent that is killed in between starts with the zone of the
// last write.
const saveInterval = 5 * time.Second

// zoneFile saves the zone to a file, so that it survives restarts. Failures are reported and never affect answers.
type zoneFile struct {
	path string // "" if the zone is not saved
	log  *slog.Logger
	due  signal.Signal // pending while the file is out of date

	mu  sync.Mutex
	err error // of the last read or write; guarded by mu
}

// changed tells run that the file is out of date.
func (f *zoneFile) changed() { f.due.Notify() }

// failed returns the error of the last read or write, or nil.
func (f *zoneFile) failed() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.err
}

// note records the outcome of a read or write, and logs an error that differs from the last one.
func (f *zoneFile) note(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err != nil && (f.err == nil || f.err.Error() != err.Error()) {
		f.log.Warn("cannot use the zone file; after a restart names fail until the API server answers", "err", err)
	}
	f.err = err
}

// load returns the zone in the file and its time, or nil.
func (f *zoneFile) load() (*zone.Zone, time.Time) {
	if f.path == "" {
		return nil, time.Time{}
	}
	saved, err := os.ReadFile(f.path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, time.Time{}
	}
	if err != nil {
		f.note(fmt.Errorf("read the saved zone: %w", err))
		return nil, time.Time{}
	}
	z, seconds, err := zone.Load(saved)
	if err != nil {
		f.note(fmt.Errorf("read the saved zone from %s: %w", f.path, err))
		return nil, time.Time{}
	}
	made := time.Unix(seconds, 0)
	f.log.Info("serving the saved zone until the API server answers", "records", z.Len(), "age", time.Since(made).Round(time.Second))
	return z, made
}

// run writes the file when it is out of date, and once more at the end. current returns the zone to write.
func (f *zoneFile) run(ctx context.Context, current func() (*zone.Zone, time.Time)) error {
	if f.path == "" {
		return nil
	}
	pause := time.NewTicker(saveInterval)
	defer pause.Stop()
	for {
		select {
		case <-ctx.Done():
		case <-f.due.C():
		}
		if z, made := current(); z != nil {
			f.note(f.save(z, made))
		}
		select {
		case <-ctx.Done():
			return nil
		case <-pause.C:
		}
	}
}

// save replaces the file atomically. On failure the old file stays.
func (f *zoneFile) save(z *zone.Zone, made time.Time) (err error) {
	if err := os.MkdirAll(filepath.Dir(f.path), 0o755); err != nil {
		return fmt.Errorf("save the zone: %w", err)
	}
	tmp, err := os.CreateTemp(filepath.Dir(f.path), filepath.Base(f.path)+".*")
	if err != nil {
		return fmt.Errorf("save the zone: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("save the zone in %s: %w", f.path, err), os.Remove(tmp.Name()))
		}
	}()
	if err := errors.Join(z.Save(tmp, made.Unix()), tmp.Sync(), tmp.Close()); err != nil {
		return err
	}
	return os.Rename(tmp.Name(), f.path)
}
