/* Moves the wall clock of a process by as many seconds as the file SLUICE_CHAOS_CLOCK says, 8 bytes that others may
   change at any time. Monotonic clocks stay, and so does what waits until a time of the wall clock. Nothing here takes
   a lock, so that a process may fork at any time. To be loaded by LD_PRELOAD. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

/* Times beyond it are the wall clock's: no machine has been up for so many seconds. */
#define LEAST_WALL_S 1000000000

static const int64_t *shared;
static int (*next_gettime)(clockid_t, struct timespec *);
static int (*next_cond_wait)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
static int (*next_sem_wait)(sem_t *, const struct timespec *);

__attribute__((constructor)) static void begin(void) {
    next_gettime = dlsym(RTLD_NEXT, "clock_gettime");
    next_cond_wait = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    if (next_cond_wait == NULL) next_cond_wait = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
    next_sem_wait = dlsym(RTLD_NEXT, "sem_timedwait");
    const char *path = getenv("SLUICE_CHAOS_CLOCK");
    int file = path == NULL ? -1 : open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return;
    void *found = mmap(NULL, sizeof *shared, PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (found != MAP_FAILED) shared = found;
}

static int64_t offset_s(void) { return shared == NULL ? 0 : __atomic_load_n(shared, __ATOMIC_RELAXED); }

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = next_gettime == NULL ? (int)syscall(SYS_clock_gettime, clock, now) : next_gettime(clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += offset_s();
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    (void)zone;
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *told) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (told != NULL) *told = now.tv_sec;
    return now.tv_sec;
}

static struct timespec unmoved(const struct timespec *until) {
    struct timespec found = *until;
    if (found.tv_sec > LEAST_WALL_S) found.tv_sec -= offset_s();
    return found;
}

int pthread_cond_timedwait(pthread_cond_t *restrict cond, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until) {
    struct timespec real = unmoved(until);
    return next_cond_wait(cond, mutex, &real);
}

int sem_timedwait(sem_t *restrict sem, const struct timespec *restrict until) {
    struct timespec real = unmoved(until);
    return next_sem_wait(sem, &real);
}
