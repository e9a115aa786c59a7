/* Streams one HTTP request over and over, on several connections at once, and prints what came as a line of JSON.
 *
 *   client PORT STREAMS REQUESTS TOKENS [PAUSE] < REQUEST
 *
 * REQUEST is the whole request as it goes over the wire. Each answer must be 200 and a whole stream of OpenAI's events
 * whose usage says TOKENS (0: an answer that is no stream, of any length). An answer without a gap longer than PAUSE
 * counts as smooth. The first thing that is wrong ends the program with a message. Times are in microseconds; gaps are those between events with text, 0 within one read.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { LINE = 1 << 15, REQUEST = 1 << 26, PIECE = 1 << 18 };

typedef struct {
    int fd, num_kept, has_status, is_done, is_over;
    long num_sent, tokens, body_left;
    double sent_at, last_at, longest;
    char kept[LINE]; /* the beginning of a line whose end has not come */
} Stream;

typedef struct {
    double *values;
    size_t count, room;
} Samples;

static char *request, piece[PIECE];
static long request_length, expected_tokens, num_started, num_requests, num_ended, num_events, num_bytes,
    num_smooth;
static double longest_allowed = 1e18;
static Samples firsts, gaps;

static void fail(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    exit(1);
}

static double now_us(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1e6 + time.tv_nsec / 1e3;
}

static void add(Samples *samples, double value) {
    if (samples->count == samples->room) {
        samples->room = samples->room ? 2 * samples->room : 4096;
        samples->values = realloc(samples->values, samples->room * sizeof(double));
        if (samples->values == NULL) fail("out of memory");
    }
    samples->values[samples->count++] = value;
}

static int compare(const void *left, const void *right) {
    double difference = *(const double *)left - *(const double *)right;
    return (difference > 0) - (difference < 0);
}

static void print_samples(const char *name, Samples *samples) {
    size_t count = samples->count;
    qsort(samples->values, count, sizeof(double), compare);
    printf(", \"%s_p50\": %.1f, \"%s_p99\": %.1f, \"%s_max\": %.1f", name, count ? samples->values[count / 2] : 0.0,
           name, count ? samples->values[count * 99 / 100] : 0.0, name, count ? samples->values[count - 1] : 0.0);
}

/* Send what is left of the request. A large one may take several calls. */
static void send_request(Stream *stream) {
    while (stream->num_sent < request_length) {
        ssize_t sent = send(stream->fd, request + stream->num_sent, request_length - stream->num_sent,
                            MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent < 0 && errno == EAGAIN) return;
        if (sent < 0) fail("sending failed: %s", strerror(errno));
        stream->num_sent += sent;
    }
}

static void begin(Stream *stream) {
    num_started++;
    stream->has_status = stream->is_done = stream->is_over = stream->num_kept = 0;
    stream->num_sent = stream->tokens = 0;
    stream->body_left = -1;
    stream->sent_at = now_us();
    stream->last_at = stream->longest = 0;
    send_request(stream);
}

static int has_text(const char *line, size_t length, const char *key, size_t key_length) {
    const char *found = memmem(line, length, key, key_length);
    return found != NULL && found[key_length] != '"';
}

static void read_event(Stream *stream, const char *line, size_t length, double now) {
    if (memmem(line, length, "\"error\":", 8) != NULL) fail("an event is an error: %.*s", (int)length, line);
    const char *usage = memmem(line, length, "\"completion_tokens\":", 20);
    if (usage != NULL) stream->tokens = strtol(usage + 20, NULL, 10);
    if (!has_text(line, length, "\"content\":\"", 11) && !has_text(line, length, "\"text\":\"", 8)) return;
    num_events++;
    add(stream->last_at ? &gaps : &firsts, now - (stream->last_at ? stream->last_at : stream->sent_at));
    if (stream->last_at && now - stream->last_at > stream->longest) stream->longest = now - stream->last_at;
    stream->last_at = now;
}

static void read_line(Stream *stream, const char *line, size_t length, double now) {
    if (!stream->has_status) {
        if (length < 12 || memcmp(line, "HTTP/1.1 200", 12) != 0) fail("the answer is %.*s", (int)length, line);
        stream->has_status = 1;
    } else if (length > 6 && memcmp(line, "data: ", 6) == 0) {
        if (line[6] == '{')
            read_event(stream, line, length, now);
        else
            stream->is_done = 1;
    } else if (expected_tokens == 0 && length > 16 && strncasecmp(line, "content-length: ", 16) == 0) {
        stream->body_left = strtol(line + 16, NULL, 10);
    } else if (stream->is_done && length == 2 && line[0] == '0') {
        stream->is_over = 1; /* the empty chunk; a blank line is the very end */
    } else if (stream->is_over && length == 1) {
        stream->is_over = 2;
    } else if (stream->body_left >= 0 && length == 1 && stream->is_over == 0) {
        stream->is_over = 3; /* the head has ended, and a body of known length follows */
    }
}

/* Return whether the answer has ended with this piece. */
static int read_piece(Stream *stream, char *data, size_t length) {
    double now = now_us();
    while (length > 0 && stream->is_over != 3) {
        char *end = memchr(data, '\n', length);
        size_t taken = end ? (size_t)(end - data) + 1 : length;
        if (stream->num_kept + taken > LINE) fail("a line is longer than %d bytes", LINE);
        if (stream->num_kept || end == NULL) {
            memcpy(stream->kept + stream->num_kept, data, taken);
            stream->num_kept += taken;
        }
        if (end != NULL && stream->num_kept) {
            read_line(stream, stream->kept, stream->num_kept - 1, now);
            stream->num_kept = 0;
        } else if (end != NULL) {
            read_line(stream, data, taken - 1, now);
        }
        data += taken;
        length -= taken;
    }
    if (stream->is_over == 3) {
        stream->body_left -= length;
        if (stream->body_left < 0) fail("an answer is longer than its head says");
        return stream->body_left == 0;
    }
    if (stream->is_over == 2 && stream->tokens != expected_tokens)
        fail("a stream has %ld tokens, not %ld", stream->tokens, expected_tokens);
    return stream->is_over == 2;
}

static void open_stream(Stream *stream, int port, int poll) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
    struct epoll_event event = {.events = EPOLLIN | EPOLLOUT | EPOLLET, .data.ptr = stream};
    int yes = 1;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    stream->fd = socket(AF_INET, SOCK_STREAM, 0);
    if (stream->fd < 0 || connect(stream->fd, (struct sockaddr *)&address, sizeof address))
        fail("connecting failed: %s", strerror(errno));
    setsockopt(stream->fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    if (epoll_ctl(poll, EPOLL_CTL_ADD, stream->fd, &event)) fail("epoll: %s", strerror(errno));
}

/* Read all that has come: events are edges. */
static void serve(Stream *stream) {
    send_request(stream);
    for (;;) {
        ssize_t length = recv(stream->fd, piece, PIECE, MSG_DONTWAIT);
        if (length < 0 && errno == EAGAIN) return;
        if (length <= 0) fail("a connection was closed: %s", length ? strerror(errno) : "by the server");
        num_bytes += length;
        if (!read_piece(stream, piece, length)) continue;
        num_ended++;
        num_smooth += stream->longest <= longest_allowed;
        if (num_started == num_requests) {
            close(stream->fd); /* a server would close it when it has been idle for some seconds */
            return;
        }
        begin(stream);
    }
}

int main(int count, char **arguments) {
    if (count != 5 && count != 6) fail("usage: client PORT STREAMS REQUESTS TOKENS [PAUSE] < REQUEST");
    if (count == 6) longest_allowed = atof(arguments[5]);
    int port = atoi(arguments[1]), num_streams = atoi(arguments[2]), poll = epoll_create1(0);
    num_requests = atol(arguments[3]);
    expected_tokens = atol(arguments[4]);
    request = malloc(REQUEST);
    Stream *streams = calloc(num_streams, sizeof(Stream));
    if (request == NULL || streams == NULL || num_requests < num_streams) fail("too large, or fewer requests than streams");
    request_length = fread(request, 1, REQUEST, stdin);
    for (int i = 0; i < num_streams; i++) open_stream(&streams[i], port, poll);
    double started = now_us();
    for (int i = 0; i < num_streams; i++) begin(&streams[i]);
    struct epoll_event events[512];
    while (num_ended < num_requests) {
        int num_ready = epoll_wait(poll, events, 512, 60000);
        if (num_ready == 0) fail("nothing came for 60 s");
        for (int i = 0; i < num_ready; i++) serve(events[i].data.ptr);
    }
    double elapsed = now_us() - started;
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    double cpu = (usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * 1e6 + usage.ru_utime.tv_usec + usage.ru_stime.tv_usec;
    printf("{\"elapsed\": %.0f, \"cpu\": %.0f, \"answers\": %ld, \"tokens\": %ld, \"events\": %ld, \"bytes\": %ld, \"smooth\": %ld",
           elapsed, cpu, num_ended, num_ended * expected_tokens, num_events, num_bytes, num_smooth);
    print_samples("first", &firsts);
    print_samples("gap", &gaps);
    puts("}");
    return 0;
}
