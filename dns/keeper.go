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

	"github.com/isthmus-net/isthmus/dns/internal/zone"
)

// keepEvery is how long changes are gathered before they are written: a restart within it serves what was so before.
const keepEvery = 5 * time.Second

// keeper keeps the zone in a file over restarts, as well as it can: whatever fails there costs nobody an answer.
type keeper struct {
	path string // "": nothing is kept
	log  *slog.Logger
	due  chan struct{} // up when the file is behind

	mu  sync.Mutex
	err error // of the last attempt; guarded by mu
}

// changed says that the file is behind.
func (k *keeper) changed() {
	select {
	case k.due <- struct{}{}:
	default:
	}
}

// failed returns why the file could not be read or written when it was last tried, or nil.
func (k *keeper) failed() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.err
}

// note keeps the outcome of an attempt, and logs what is new of it.
func (k *keeper) note(err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if err != nil && (k.err == nil || k.err.Error() != err.Error()) {
		k.log.Warn("names would not be known after a restart until the API server answers", "err", err)
	}
	k.err = err
}

// load returns the zone in the file and when it was made, or nil.
func (k *keeper) load() (*zone.Zone, time.Time) {
	if k.path == "" {
		return nil, time.Time{}
	}
	saved, err := os.ReadFile(k.path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, time.Time{}
	}
	if err != nil {
		k.note(fmt.Errorf("read the last zone: %w", err))
		return nil, time.Time{}
	}
	z, seconds, err := zone.Load(saved)
	if err != nil {
		k.note(fmt.Errorf("read the last zone from %s: %w", k.path, err))
		return nil, time.Time{}
	}
	made := time.Unix(seconds, 0)
	k.log.Info("serve the zone from before the restart until the API server answers", "records", z.Len(), "age", time.Since(made).Round(time.Second))
	return z, made
}

// run writes the file when it is behind, and a last time at the end. known returns what to write.
func (k *keeper) run(ctx context.Context, known func() (*zone.Zone, time.Time)) error {
	if k.path == "" {
		return nil
	}
	pause := time.NewTicker(keepEvery)
	defer pause.Stop()
	for {
		select {
		case <-ctx.Done():
		case <-k.due:
		}
		if z, made := known(); z != nil {
			k.note(k.save(z, made))
		}
		select {
		case <-ctx.Done():
			return nil
		case <-pause.C:
		}
	}
}

// save replaces the file by one of z, or leaves it as it was.
func (k *keeper) save(z *zone.Zone, made time.Time) (err error) {
	if err := os.MkdirAll(filepath.Dir(k.path), 0o755); err != nil {
		return fmt.Errorf("keep the zone: %w", err)
	}
	f, err := os.CreateTemp(filepath.Dir(k.path), filepath.Base(k.path)+".*")
	if err != nil {
		return fmt.Errorf("keep the zone: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("keep the zone in %s: %w", k.path, err), os.Remove(f.Name()))
		}
	}()
	if err := errors.Join(z.Save(f, made.Unix()), f.Sync(), f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), k.path)
}
