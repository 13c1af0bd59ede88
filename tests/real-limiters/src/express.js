// An express server behind express-rate-limit: express.js PORT COUNT WINDOW_MS HEADERS LOG
const fs = require('node:fs');
const express = require('express');
const { rateLimit } = require('express-rate-limit');

const [port, count, windowMs, headers, file] = process.argv.slice(2);
const log = fs.openSync(file, 'a');

const options = {
    limit: Number(count),
    windowMs: Number(windowMs),
    standardHeaders: headers.startsWith('draft-') ? headers : false,
    legacyHeaders: headers === 'legacy',
};
if (headers === 'retry-after') {
    options.handler = (request, response) => {
        const left = request.rateLimit.resetTime.getTime() - Date.now();
        response.status(429).set('Retry-After', String(Math.max(1, Math.ceil(left / 1000)))).send('too many');
    };
}

const app = express();
app.use((_, response, next) => {
    const at = Date.now();
    response.on('finish', () => fs.writeSync(log, `${response.statusCode} ${at}\n`));
    next();
});
app.use(rateLimit(options));
app.get('/', (_, response) => response.send('ok'));
const server = app.listen(Number(port), '127.0.0.1');
server.keepAliveTimeout = 3600000;
